"""The smoke job with torch's CUDA build on a machine without a GPU, by each launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Run


@pytest.mark.parametrize("launch", ["srun", "fork", "torchrun"])
def test_the_smoke_job(hpcinit: Run, tmp_path: Path, launch: str) -> None:
    """Its ranks succeed on the CPU, without a GPU."""
    done = hpcinit("submit", f"launch={launch}", "ranks_per_node=2", "job=smoke", "wait=true")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [path.read_text() for path in sorted((tmp_path / "runs").glob("*/logs/rank-*.log"))]
    assert len(logs) == 2 and "gloo on cpu" in logs[0]
