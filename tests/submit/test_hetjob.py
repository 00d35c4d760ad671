"""Heterogeneous jobs: components with their own partition, nodes and ranks, as one world or as a world each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcinit.checks import all_checks
from hpcinit.config.compose import compose
from hpcinit.records import components, job_log, spec
from hpcinit.records.components import Component
from hpcinit.submit import job_environment
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, job_id_of, printed, submit
from tests.waiting import until

SECOND = "hetjob=[{nodes: 1, ranks_per_node: 3, gpus_per_node: 0, cpus_per_rank: 1, partition: high}]"
FIRST = ["cluster=mini", "nodes=2", "ranks_per_node=1", "gpus_per_node=2", "cpus_per_rank=2"]


def test_all_problems_are_reported_in_one_pass() -> None:
    """Each message names the component, the value and the expected value."""
    wrong = "hetjob=[{nods: 1, nodes: 0, mem_gb: all, partition: 1, gpus_per_node: -1}]"
    found = all_checks.problems(compose(["cluster=mini", wrong, "launch=fork", "spare_nodes=1", "chain=2"]))
    assert found == [
        "hetjob is set and launch.kind is fork, expected srun: heterogeneous jobs support no other value",
        "hetjob is set and spare_nodes is 1, expected 0: heterogeneous jobs support no other value",
        "hetjob is set and chain is 2, expected 1: heterogeneous jobs support no other value",
        "hetjob[0].nods is not a key of a component, expected one of: nodes, ranks_per_node, gpus_per_node, "
        "cpus_per_rank, mem_gb, partition, account, qos",
        "hetjob[0].nodes is 0, expected a whole number, 1 or more",
        "hetjob[0].mem_gb is 'all', expected a number, 0 or more",
        "hetjob[0].partition is 1, expected a name",
        "hetjob[0].gpus_per_node is -1, expected a whole number, 0 or more",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hetjob=[{nodes: 9}]"], "hetjob[0]: nodes=9, but partition 'main' of cluster mini allows at most 4"),
        (["hetjob=[{}]", "restart.max_restarts=1"], "hetjob is set and restart.max_restarts is 1, expected 0"),
        (["hetjob=[{}]", "cluster.engine=local"], "hetjob is set and cluster.engine is local, expected slurm"),
        (["worlds=each"], "worlds is each, but hetjob is empty: remove worlds, or add components"),
    ],
)
def test_a_component_is_checked_like_a_request(words: list[str], message: str) -> None:
    """A component cannot request more than its partition has, and features without components are refused."""
    assert any(message in problem for problem in all_checks.problems(compose(["cluster=mini", *words])))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", "--multirun", "seed=1,2", "dry_run=true"], "a sweep cannot use hetjob"),
        (["plan", "model.params=1e6"], "hpcinit plan does not support heterogeneous jobs"),
        (["export"], "hpcinit export does not support heterogeneous jobs (hetjob is set)"),
    ],
)
def test_commands_that_need_equal_nodes(hpcinit: Run, words: list[str], message: str) -> None:
    """A sweep, `hpcinit plan` and `hpcinit export` are refused."""
    done = hpcinit(*words, *FIRST, SECOND, "job=smoke")
    assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr


def test_the_layout_covers_all_components(tmp_path: Path) -> None:
    """The spec has the components of the world, and tensor parallel groups fit the nodes of each component."""
    words = [*FIRST, "ranks_per_node=4", "gpus_per_node=4", "hetjob=[{nodes: 1, ranks_per_node: 2}]"]
    config = compose([*words, "parallel.tp=2"])
    assert all_checks.problems(config, to_submit=False) == []
    made = job_environment.make_spec(config, Path("/w"))
    assert (made.nodes, made.world_size, made.layout.dp_replicate) == (3, 10, 5)
    (tmp_path / "spec.json").write_text(made.to_json())
    assert spec.load(tmp_path / "spec.json") == made
    (problem,) = all_checks.problems(compose([*words, "parallel.tp=4"]), to_submit=False)
    assert "which does not divide 10 ranks" in problem
    (problem,) = all_checks.problems(compose([*words, "parallel.tp=4", "nodes=1", TWO]), to_submit=False)
    assert "tp 4 does not divide the 2 ranks of a node" in problem
    (problem,) = all_checks.problems(compose([*words, "parallel.tp=4", "worlds=each"]), to_submit=False)
    assert "which does not divide 1 node x 2 ranks" in problem, "the second component is a world of 2 ranks"


def test_ranks_are_numbered_over_the_components() -> None:
    """The nodes of a rank, and the ranks that srun names in each component."""
    parts = [Component(2, 1), Component(1, 3)]
    assert [components.node_of(parts, rank) for rank in range(5)] == [0, 1, 2, 2, 2]
    assert components.shape(parts) == "2 nodes x 1 rank + 1 node x 3 ranks"
    log = (
        "hpcinit: component 0, ranks from 0: n[2-3]\nhpcinit: component 1, ranks from 2: n1\n"
        "srun: error: n1: tasks 0,2: Killed\nsrun: error: n3: task 1: Terminated\n"
    )
    assert [(end.host, end.ranks) for end in job_log.read(log).ends] == [("n1", (2, 4)), ("n3", (1,))]
    assert job_log.read(log).output == ()


TWO = "hetjob=[{nodes: 2, ranks_per_node: 2}]"

WORLD = """
import json, os
import torch, torch.distributed as dist
import hpcinit
from hpcinit.slurm import nodelist
run = hpcinit.init()
total = torch.tensor([run.world.rank + 1.0])
dist.all_reduce(total)
host = os.environ["SLURMD_NODENAME"]
[group] = [at for at in "01" if host in nodelist.expand(os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{at}"])]
where = [host, os.environ[f"SLURM_JOB_PARTITION_HET_GROUP_{group}"]]
print("found", json.dumps([run.world.rank, run.world.world_size, run.world.local_rank, *where, total.item()]))
"""


def lines(folder: Path, ranks: int) -> list[list[Any]]:
    return [of_log(printed(folder, rank)) for rank in range(ranks)]


def of_log(text: str) -> list[Any]:
    """Return what a rank found, from its log."""
    (line,) = [line for line in text.splitlines() if line.startswith("found ")]
    return json.loads(line.partition(" ")[2])  # type: ignore[no-any-return]


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_one_world_over_the_components(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """On the real Slurm, 2 nodes with a rank each and a node of another partition with 3 ranks form one world."""
    (tmp_path / "train.py").write_text(WORLD)
    done = submit(hpcinit, idle_slurm, *FIRST[1:], SECOND, "wait=true", "--", "train.py", timeout=400)
    folder = folder_of(done)
    assert done.returncode == 0, done.stderr + (folder / "logs/job.log").read_text()
    assert "2 nodes x 1 rank + 1 node x 3 ranks" in done.stdout
    found = lines(folder, 5)
    assert [line[:3] for line in found] == [[0, 5, 0], [1, 5, 0], [2, 5, 0], [3, 5, 1], [4, 5, 2]]
    assert [line[4:] for line in found] == [["main", 15.0]] * 2 + [["high", 15.0]] * 3
    hosts = [line[3] for line in found]
    assert len(set(hosts)) == 3 and len(set(hosts[2:])) == 1
    logs = hpcinit("logs", "--rank", "3", str(folder), env=idle_slurm.env).stdout
    assert of_log(logs) == found[3]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [
        "job.log",
        *(f"rank-{n}.log" for n in range(5)),
    ]
    status = json.loads(hpcinit("status", "--json", folder.name, env=idle_slurm.env).stdout)
    assert (status["state"], status["exit_status"]) == ("COMPLETED", 0)


@pytest.mark.slurm
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "end", ["raise SystemExit(7)", pytest.param("os.kill(os.getpid(), 9)", marks=pytest.mark.more)]
)
def test_the_rank_that_fails_is_named(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, end: str) -> None:
    """`why` names rank 3 and its host, which to srun is task 1 of the second component, also without a record of it."""
    program = WORLD + f"dist.barrier()\nif run.world.rank == 3:\n    {end}\nimport time\ntime.sleep(300)\n"
    (tmp_path / "train.py").write_text(program)
    done = submit(hpcinit, idle_slurm, *FIRST[1:], SECOND, "wait=true", "--", "train.py", timeout=400)
    folder = folder_of(done)
    assert done.returncode not in (0, 2), done.stderr
    verdict = json.loads(hpcinit("why", "--json", str(folder), env=idle_slurm.env).stdout)
    assert (verdict["rank"], verdict["host"]) == (3, lines(folder, 5)[3][3]), verdict
    assert verdict["state"] == "FAILED" and "rank 3 on" in verdict["verdict"], verdict


@pytest.mark.more
@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_the_stacks_of_all_components_and_cancel(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """`stacks` and `exec` reach the ranks of both components, and `cancel` ends them all."""
    (tmp_path / "train.py").write_text(WORLD + "import time\ntime.sleep(300)\n")
    done = submit(hpcinit, idle_slurm, *FIRST[1:], SECOND, "--", "train.py", timeout=400)
    folder, env = folder_of(done), idle_slurm.env
    until(
        lambda: [path.read_text().endswith("]\n") for path in folder.glob("logs/rank-?.log")] == [True] * 5,
        120,
    )
    stacks = json.loads(hpcinit("stacks", "--json", str(folder), env=env).stdout)
    assert (stacks["missing"], stacks["silent_nodes"]) == ([], []), stacks
    assert sorted(rank for group in stacks["groups"] for rank in group["ranks"]) == list(range(5))
    (group,) = json.loads(hpcinit("stacks", "--json", "--rank", "4", str(folder), env=env).stdout)["groups"]
    host = lines(folder, 5)[4][3]
    assert (group["ranks"], group["hosts"]) == ([4], [host])
    beside = hpcinit("exec", "--rank", "4", str(folder), "--", "sh", "-c", "echo $SLURMD_NODENAME", env=env)
    assert beside.stdout.split() == [host], beside.stderr
    status = json.loads(hpcinit("status", "--json", str(folder), env=env).stdout)
    assert (status["state"], status["job_id"]) == ("RUNNING", job_id_of(done))
    assert hpcinit("cancel", str(folder), env=env).returncode == 0
    until(lambda: not idle_slurm.run("squeue", "--noheader").strip(), 60)
    status = json.loads(hpcinit("status", "--json", str(folder), env=env).stdout)
    assert status["state"] == "CANCELLED"


@pytest.mark.more
@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_world_each(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """With worlds=each the components are separate worlds. The folder of the second is a run folder to all commands,
    and `why` of the run shows the world that failed."""
    (tmp_path / "train.py").write_text(
        WORLD + "dist.barrier()\nif run.world.world_size == 3 and run.world.rank == 2:\n    raise ValueError('no')\n"
    )
    words = [*FIRST[1:], SECOND, "worlds=each", "wait=true"]
    done = submit(hpcinit, idle_slurm, *words, "--", "train.py", timeout=400)
    folder, env = folder_of(done), idle_slurm.env
    second = folder / "component-1"
    assert done.returncode not in (0, 2), done.stderr + (folder / "logs/job.log").read_text()
    one, other = lines(folder, 2), lines(second, 3)
    assert [line[:3] for line in one] == [[0, 2, 0], [1, 2, 0]] and {line[5] for line in one} == {3.0}
    assert [line[:3] for line in other] == [[0, 3, 0], [1, 3, 1], [2, 3, 2]] and {line[5] for line in other} == {6.0}
    assert {line[4] for line in one} == {"main"} and {line[4] for line in other} == {"high"}
    for run in (folder, second):
        verdict = json.loads(hpcinit("why", "--json", str(run), env=env).stdout)
        assert (verdict["run"], verdict["rank"], verdict["host"]) == (str(second), 2, other[2][3])
        status = json.loads(hpcinit("status", "--json", str(run), env=env).stdout)
        assert (status["state"], status["job_id"]) == ("FAILED", job_id_of(done))
    assert "ValueError: no" in hpcinit("logs", "--rank", "2", f"{folder.name}/component-1", env=env).stdout


DEVICES = """
import os, hpcinit
run = hpcinit.init()
print("devices", run.world.rank, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
"""


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_each_component_has_its_own_devices_and_memory(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The second component has two GPUs. The first has none, but more memory."""
    (tmp_path / "train.py").write_text(DEVICES)
    words = ["ranks_per_node=1", "gpus_per_node=0", "cpus_per_rank=1", "mem_gb=2"]
    other = "hetjob=[{gpus_per_node: 2, cpus_per_rank: 2, mem_gb: 1}]"
    done = submit(hpcinit, idle_slurm, *words, other, "wait=true", "--", "train.py", timeout=400)
    folder = folder_of(done)
    assert done.returncode == 0, done.stderr + (folder / "logs/job.log").read_text()
    assert [printed(folder, rank).splitlines()[-1] for rank in range(2)] == ["devices 0 ", "devices 1 0,1"]
