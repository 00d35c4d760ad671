"""Skip a test whose requirements this machine lacks; fail it in CI."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

# torch itself does not quote the path of its libraries when it calls the compiler.
needs_torchs_compiler = pytest.mark.skipif(
    " " in sys.prefix, reason=f"torch cannot compile with a blank in {sys.prefix}"
)


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail it with CI=true, where a skip would be overlooked."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def installed(name: str) -> str:
    """Return the path of a program, next to this Python (.venv need not be active) or on PATH. Skip if there is none."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return found or skip_or_fail(f"{name} is not installed")
