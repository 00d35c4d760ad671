"""submitit's own tests, with hpcinit's executors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_submitits_own_tests() -> None:
    """submitit's tests of executors and jobs pass with hpcinit's, except those that tests/submitit_suite lists."""
    command = [sys.executable, "-m", "tests.submitit_suite", "-q", "-n", "2", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
