"""On many nodes of a real Slurm every rank starts, all-reduces, and leaves no process behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.minislurm.processes import command_name
from tests.submitting import folder_of, printed, submit

ALL = "HPCINIT_SCALE"  # environment variable: a number of nodes, for `make scale`
NODES = int(os.environ.get(ALL, "0") or 12)
# All interpreters import torch on the cores of one machine, in effect one after the other.
START_S = 120 + 15 * NODES
DAEMONS = {"slurmd", "sleep", "munged", "slurmctld", "slurmscriptd"}

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(START_S + 300)]


@pytest.fixture
def many() -> Iterator[MiniSlurm]:
    """Yield a cluster with NODES nodes. Slurm sends through a tree of 16 branches, as on a real one."""
    require_slurm()
    options = {"TreeWidth": "16", "SlurmdTimeout": "300", "MessageTimeout": "60", "BatchStartTimeout": "120"}
    with MiniSlurm(nodes=NODES, gpus=0, name=f"scale-{os.getpid()}", options=options) as cluster:
        yield cluster


def test_every_node_runs_a_rank(hpcinit: Run, many: MiniSlurm) -> None:
    """With a rank on each node, all start, the sum is correct on each, and no process of the job remains."""
    sizes = [f"nodes={NODES}", "ranks_per_node=1", f"cluster.partitions.main.nodes={NODES}", "cluster.gpus_per_node=0"]
    formula = [f"comm.timeout_base_s={START_S}", "cluster.cpus_per_node=1", f"time_min={START_S // 60 + 5}"]
    done = submit(hpcinit, many, *sizes, *formula, "wait=true", timeout=START_S + 200)
    assert done.returncode == 0, done.stdout + done.stderr + _logs(done.stdout)
    folder = folder_of(done)
    total = NODES * (NODES - 1) // 2
    for rank in range(NODES):
        said = printed(folder, rank).splitlines()[-1]  # before it torch's warnings of names that it cannot find
        place = f"host n{rank + 1}, node {rank}, local rank 0 of 1, gloo on cpu"
        assert said == f"rank {rank} of {NODES}: {place}, all-reduce {total}"
    many.wait_idle()
    left = {node: names for node in many.nodes if (names := _left(many, node))}
    assert not left
    zero = (folder / "logs/rank-0.log").read_text()
    print(*(line for line in zero.splitlines() if "up in" in line))


def _left(cluster: MiniSlurm, node: str) -> list[str]:
    return [name for pid in cluster.pids(node) if (name := command_name(pid)) not in {*DAEMONS, ""}]


def _logs(stdout: str) -> str:
    """Return the ends of the longest logs, for the message of a failure."""
    if "run folder: " not in stdout:
        return ""
    folder = Path(stdout.partition("run folder: ")[2].partition("\n")[0])
    return "".join(f"\n{path}\n{path.read_text()[-2000:]}" for path in sorted((folder / "logs").glob("*"))[:3])
