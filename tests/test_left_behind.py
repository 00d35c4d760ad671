"""The report of a failed test contains the logs of its runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
def test_a_run(tmp_path):
    (tmp_path / "runs/a-0001/logs").mkdir(parents=True)
    (tmp_path / "runs/a-0001/logs/job.log").write_text("\\n".join(f"line {n}." for n in range(100)))
    assert not tmp_path.name

def test_that_passes(tmp_path):
    (tmp_path / "runs/b-0001/logs").mkdir(parents=True)
    (tmp_path / "runs/b-0001/logs/job.log").write_text("no problem")
"""


def test_the_end_of_each_log_is_shown(tmp_path: Path) -> None:
    """The last 30 lines of a log are below the failure; a test that passes shows none."""
    (tmp_path / "test_it.py").write_text(TESTS)
    own = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }  # without the variables of xdist's workers
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.left_behind"]
    output = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False).stdout
    assert "1 failed, 1 passed" in output and "end of runs/a-0001/logs/job.log" in output
    assert "line 99.\n" in output and "line 70.\n" in output and "line 69." not in output and "no problem" not in output
