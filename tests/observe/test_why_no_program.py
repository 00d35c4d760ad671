"""`hpcinit why` of a run whose program does not exist on the nodes, recorded by a real job."""

from __future__ import annotations

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit

LINE = "error: execve(): python3.99: No such file or directory"  # after slurmstepd-n1, or in Slurm 26.05 after the time


@pytest.mark.slurm
def test_the_only_line_of_a_log_is_quoted(hpcinit: Run, slurm: MiniSlurm) -> None:
    """The Python of the ranks is missing on the nodes: `why` quotes the only line of the log, and what to check."""
    done = submit(hpcinit, slurm, "ranks_per_node=1", "cluster.python=python3.99", "check_paths=false", "wait=true")
    run = folder_of(done)
    line = (run / "logs/rank-0.log").read_text().rstrip("\n")
    assert done.returncode == 2 and line.endswith(LINE) and "\n" not in line, done.stdout
    said = hpcinit("why", str(run), env=slurm.env).stdout
    assert line in said.splitlines()[0] and "exists on the compute nodes" in said, said
