"""What a machine lacks for a test, said where it is seen."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest


def leave_out(reason: str) -> NoReturn:
    """Skips, and with CI=true, where a skip would go unseen, fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def installed(name: str) -> str:
    """The path of a program that the test needs, beside this Python (nobody activates .venv) or on PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return found or leave_out(f"{name} is not installed")
