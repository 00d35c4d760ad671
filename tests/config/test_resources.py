"""A job requests the GPUs, cores and memory that its ranks need, unless nodes are whole or the user asks for more."""

from __future__ import annotations

import json

import pytest

from hpcinit.checks import all_checks
from hpcinit.config import resources
from hpcinit.config.compose import compose
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import job_id_of, submit
from tests.waiting import until

MINI = ["cluster=mini"]  # nodes of 8 GPUs and 16 cores
MEMORY = [*MINI, "cluster.mem_gb=64"]
WHOLE = [*MINI, "cluster.whole_nodes=true"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (MINI, (8, 8, 2, None)),
        ([*MINI, "ranks_per_node=2"], (2, 2, 2, None)),
        ([*MINI, "ranks_per_node=3"], (3, 3, 2, None)),
        ([*MINI, "ranks_per_node=1"], (1, 1, 2, None)),
        ([*MINI, "ranks_per_node=1", "cpus_per_rank=16"], (1, 1, 16, None)),
        # The user asks for more.
        ([*MINI, "ranks_per_node=1", "gpus_per_node=4"], (1, 4, 8, None)),
        ([*MINI, "ranks_per_node=2", "cluster.exclusive=true"], (2, 8, 8, None)),
        # gpus_per_node and gpus set the number of ranks.
        ([*MINI, "gpus_per_node=4"], (4, 4, 2, None)),
        ([*MINI, "gpus=2"], (2, 2, 2, None)),
        ([*MINI, "gpus=8", "nodes=2"], (4, 4, 2, None)),
        ([*MEMORY, "gpus_per_node=0", "ranks_per_node=2"], (2, 0, 2, 16)),
        # Memory.
        (MEMORY, (8, 8, 2, 64)),
        ([*MEMORY, "ranks_per_node=2"], (2, 2, 2, 16)),
        ([*MEMORY, "ranks_per_node=2", "mem_gb=50"], (2, 2, 2, 50)),
        ([*MINI, "cluster.mem_gb=0", "ranks_per_node=2"], (2, 2, 2, 0)),
        ([*MINI, "cluster.mem_gb=0", "cluster.partitions.main.mem_gb=64", "ranks_per_node=2"], (2, 2, 2, 16)),
        ([*MINI, "cluster.mem_gb=0", "cluster.partitions.main.mem_gb=64"], (8, 8, 2, 0)),
        # Whole nodes.
        ([*WHOLE, "ranks_per_node=2"], (2, 8, 8, None)),
        ([*WHOLE, "ranks_per_node=2", "cluster.mem_gb=64"], (2, 8, 8, 64)),
        ([*MINI, "cluster.partitions.main.whole_nodes=true", "ranks_per_node=2"], (2, 8, 8, None)),
        ([*WHOLE, "cluster.partitions.main.whole_nodes=false", "ranks_per_node=2"], (2, 2, 2, None)),
        ([*MINI, "cluster.gpu_flag=null", "ranks_per_node=2"], (2, 8, 8, None)),
        # No GPUs: all cores, as there is nothing to divide them by.
        ([*MINI, "cluster.gpus_per_node=0", "ranks_per_node=2"], (2, 0, 8, None)),
        (["cluster=local", "ranks_per_node=2"], (2, 0, None, None)),
    ],
)
def test_the_request_per_node(overrides: list[str], expected: tuple[int, int, int | None, float | None]) -> None:
    """Ranks, GPUs, cores per rank and memory follow the ranks, gpus, gpus_per_node and whole nodes."""
    config = compose(overrides)
    assert all_checks.problems(config) == []
    found = (resources.ranks_per_node(config), resources.gpus_per_node(config))
    assert (*found, resources.cpus_per_rank(config), resources.mem_gb(config)) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gpus_per_node=9"], "gpus_per_node=9, but a node of partition 'main' of cluster mini has 8 GPUs (cluster.gpus_per_node): set gpus_per_node=8 or less"),
        (["gpus=16"], "gpus=16, but a node of partition 'main' of cluster mini has 8 GPUs (cluster.gpus_per_node): set nodes=2"),
        (["gpus=40", "nodes=4"], "gpus=40, but a node of partition 'main' of cluster mini has 8 GPUs (cluster.gpus_per_node): expected at most nodes=4 gpus=32"),
        (["gpus=3", "nodes=2"], "gpus=3 is not a multiple of nodes=2: set gpus=2 or gpus=4"),
        (["gpus=2", "gpus_per_node=2"], "gpus=2 and gpus_per_node=2 are both set; remove one"),
        (["gpus=2", "ranks_per_node=4"], "ranks_per_node=4, but gpus=2 requests 2 GPUs per node, and each rank needs one: set ranks_per_node=2 or less"),
        (["gpus=0"], "gpus is 0, expected 1 or more"),
        (["cluster=local", "gpus=2"], "gpus=2, but cluster local has no option that requests GPUs (cluster.gpu_flag is null): set ranks_per_node=2"),
        (["cluster.partitions.main.gpus_per_node=0", "gpus=2"], "gpus=2, but a node of partition 'main' of cluster mini has 0 GPUs (gpus_per_node of the partition): remove it"),
    ],
)  # fmt: skip
def test_impossible_requests(overrides: list[str], message: str) -> None:
    """A request for GPUs that a node does not have gives one message with what to type."""
    assert all_checks.problems(compose([*MINI, *overrides])) == [message]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["ranks_per_node=2"], "2 GPUs and 4 cores per node"),
        (["ranks_per_node=1", "cluster.mem_gb=64"], "1 GPU, 2 cores and 8 GB per node"),
        (["cluster.whole_nodes=true", "ranks_per_node=1"], "8 GPUs and 16 cores per node (whole nodes)"),
        (["cluster.gpus_per_node=0", "cluster.cpus_per_node=null"], ""),
        (["cluster=local"], ""),
    ],
)
def test_the_request_as_text(overrides: list[str], text: str) -> None:
    """The submission summary describes the request per node."""
    assert resources.requested(compose([*MINI, *overrides])).described() == text


@pytest.mark.slurm
def test_small_jobs_share_a_node(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """Two jobs of two ranks run on one node at the same time, each with two GPUs and a quarter of the cores."""
    jobs = []
    for name in ("one", "two"):
        words = ["ranks_per_node=2", f"name={name}", "+cluster.sbatch.nodelist=n1", "--", "sleep", "60"]
        done = submit(hpcinit, idle_slurm, *words)
        assert "\nrequest: 2 GPUs and 4 cores per node\n" in done.stdout, done.stdout + done.stderr
        jobs.append(job_id_of(done))
    try:
        for job in jobs:
            until(lambda job=job: "RUNNING" in idle_slurm.run("squeue", "-h", "-j", job, "-o", "%T"), 30, 0.2)  # type: ignore[misc]
            shown = idle_slurm.run("scontrol", "show", "job", job)
            assert (
                "NumCPUs=4 " in shown
                and "NodeList=n1\n" in shown
                and "gres:gpu:2" in shown.replace("gres/gpu", "gres:gpu")
            ), shown
    finally:
        idle_slurm.run("scancel", *jobs)


@pytest.mark.slurm
def test_json_contains_the_request(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """--json has the request per node as numbers."""
    done = submit(hpcinit, idle_slurm, "--json", "gpus=2", "wait=true", "--", "true")
    document = json.loads(done.stdout)
    assert document["ranks_per_node"] == 2
    assert document["request"] == {"gpus": 2, "cores": 4, "mem_gb": None, "whole_nodes": False}
