"""A failed test tells what its runs have logged."""

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
    (tmp_path / "runs/b-0001/logs/job.log").write_text("all is well")
"""


def test_the_end_of_each_log_is_told(tmp_path: Path) -> None:
    """The last 30 lines, below the failure; nothing of a test that passes."""
    (tmp_path / "test_it.py").write_text(TESTS)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of xdist's workers
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.left_behind"]
    said = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False).stdout
    assert "1 failed, 1 passed" in said and "end of runs/a-0001/logs/job.log" in said
    assert "line 99.\n" in said and "line 70.\n" in said and "line 69." not in said and "all is well" not in said
