"""Ranks that are forked from a process with torch behave as a Python that was started for them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.runtime.spawned import Rank

CODE = "import os, sys; print(os.environ['X'], os.getcwd(), __name__, sys.argv, sys.path[0] == '', 'torch' in sys.modules); sys.exit(7)"


@pytest.mark.parametrize("fresh", [False, True])
def test_a_forked_rank_has_its_environment_folder_log_and_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    """Both kinds of rank print the same and exit with the same status; only the forked one has torch from the start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    status, output = Rank(CODE, tmp_path / "log", {"X": "5"}, fresh).end()
    assert (status, output) == (7, f"5 {tmp_path} __main__ ['-c'] True {not fresh}\n")


def test_a_forked_rank_is_a_child_that_can_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wait() returns the signal like subprocess does."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    rank = Rank("import time; time.sleep(600)", tmp_path / "log", {})
    assert rank.process.poll() is None
    rank.process.send_signal(signal.SIGKILL)
    assert rank.end() == (-signal.SIGKILL, "")
