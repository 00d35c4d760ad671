"""`pytest --cost FILE` writes the cost of each test, with the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cost import sums

ROOT = Path(__file__).parent.parent
BUSY = "import time\\nwhile time.process_time() < 0.3: pass"


def test_processor_time_includes_processes_that_a_test_starts(tmp_path: Path) -> None:
    """The processor time of a process that a test starts counts for the test; a sleep costs only wall time."""
    (tmp_path / "test_two.py").write_text(
        f"import subprocess, sys, time\n"
        f"def test_busy(): subprocess.run([sys.executable, '-c', '{BUSY}'], check=True)\n"
        f"def test_sleeps(): time.sleep(0.3)\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    words = ["-p", "tests.cost", "-p", "no:cacheprovider", "--cost", "costs"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "costs").read_text().splitlines()
    (_, busy_wall, busy), (_, sleep_wall, sleep) = (sums([line])["all"] for line in lines)
    assert busy >= 0.3 and busy_wall >= 0.3 and sleep_wall >= 0.3 and sleep < 0.2, lines
    assert sums(lines)["test_two.py"][0] == 2
