"""submitit's own tests, with hpcinit's executors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import submitit

from tests.skip_or_fail import skip_or_fail

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "tests/submitit_suite/expected.txt").read_text()


@pytest.mark.more
def test_submitits_own_tests() -> None:
    """submitit's tests of executors and jobs pass with hpcinit's, except those that tests/submitit_suite lists."""
    if f"submitit {submitit.__version__} " not in TABLE:
        skip_or_fail(f"tests/submitit_suite/expected.txt is not for submitit {submitit.__version__}")
    command = [sys.executable, "-m", "tests.submitit_suite", "-q", "-n", "2", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
