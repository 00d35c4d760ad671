"""Run submitit's own tests with hpcinit's executors: python -m tests.submitit_suite [options of pytest]."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import submitit

# The other files test functions that hpcinit does not replace, or fakes (core/test_core.py, test_async.py).
FILES = ("slurm/test_slurm.py", "auto/test_auto.py", "core/test_plugins.py", "local/test_local.py", "test_helpers.py")

if __name__ == "__main__":
    folder = Path(submitit.__file__).parent
    files = [str(folder / name) for name in FILES]
    config = Path(__file__).parents[2] / "pyproject.toml"
    sys.exit(pytest.main(["-p", "tests.submitit_suite.plugin", "-c", str(config), "-rxX", *sys.argv[1:], *files]))
