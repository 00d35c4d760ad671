"""A heterogeneous job: components with their own partition, nodes and ranks, with one world or one world each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.config import checks
from hpcinit.config.compose import compose
from hpcinit.records import spec
from hpcinit.submit import job_environment
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, printed, submit

SECOND = "components=[{nodes: 1, ranks_per_node: 3, gpus_per_node: 0, cpus_per_rank: 1, partition: high}]"
FIRST = ["cluster=mini", "nodes=2", "ranks_per_node=1", "gpus_per_node=2", "cpus_per_rank=2"]


def directives(text: str) -> list[list[str]]:
    """Return the options of each component in a batch script."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    at = lines.index("hetjob")
    return [lines[:at], lines[at + 1 :]]


def test_a_dry_run_shows_the_options_of_each_component(hpcinit: Run) -> None:
    """Each component has its own options of sbatch, and one srun starts the ranks of all of them."""
    text = hpcinit("submit", *FIRST, SECOND, "dry_run=true", "--", "true").stdout
    one, other = directives(text)
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--cpus-per-task=2", "--partition=main"} <= set(
        one
    )
    assert {"--nodes=1", "--ntasks-per-node=3", "--cpus-per-task=1", "--partition=high"} <= set(other)
    assert not any("gpus" in line for line in other) and one[-1] == other[-1] == "--time=00:10:00"
    assert text.startswith("#!/bin/bash\n# true: true, 2 nodes x 1 rank + 1 node x 3 ranks\n")
    (step,) = [line for line in text.splitlines() if line.startswith("srun ")]
    left, right = step.split(" : ")
    assert "--ntasks=2 " in left and "--het-group=0 " in left and "--ntasks=3 " in right and "--het-group=1 " in right
    assert left.split("--het-group=0")[1] == right.split("--het-group=1")[1], "the same command"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["components=[{nods: 1}]"],
            "components[0].nods is no key of a component, expected one of: nodes, ranks_per_node",
        ),
        (["components=[{nodes: 0}]"], "components[0].nodes is 0, expected a whole number, 1 or more"),
        (["components=[{mem_gb: all}]"], "components[0].mem_gb is 'all', expected a number, 0 or more"),
        (["components=[{partition: 1}]"], "components[0].partition is 1, expected the name of a partition"),
        (["components=[{nodes: 9}]"], "components[0]: nodes=9, but partition 'main' of cluster mini allows at most 4"),
        (["components=[{}]", "launch=fork"], "components are set and launch.kind is fork: a heterogeneous job needs "),
        (["components=[{}]", "spare_nodes=1"], "components are set and spare_nodes is 1: a heterogeneous job needs "),
        (["components=[{}]", "restart.max_restarts=1"], "restart.max_restarts is 1: a heterogeneous job needs "),
    ],
)
def test_invalid_components_are_refused(words: list[str], message: str) -> None:
    """Each message names the component, the value and the expected value."""
    (problem,) = checks.problems(compose(["cluster=mini", *words]))
    assert message in problem


def test_a_sweep_is_refused(hpcinit: Run) -> None:
    """Slurm has no arrays of heterogeneous jobs."""
    done = hpcinit("submit", "--multirun", *FIRST, SECOND, "seed=1,2", "dry_run=true", "--", "true")
    assert done.returncode == 2 and "components are set in a sweep, expected none" in done.stderr


def test_the_layout_covers_all_components() -> None:
    """The spec has the nodes and ranks of the world, and tensor parallel groups are within the nodes of each component."""
    config = compose(
        [*FIRST, "ranks_per_node=4", "gpus_per_node=4", "components=[{nodes: 1, ranks_per_node: 2}]", "parallel.tp=2"]
    )
    assert checks.problems(config, to_submit=False) == []
    made = job_environment.make_spec(config, Path("/w"))
    assert (made.nodes, made.world_size, made.layout.dp_replicate) == (3, 10, 5)
    config = compose(
        [*FIRST, "ranks_per_node=4", "gpus_per_node=4", "components=[{nodes: 1, ranks_per_node: 2}]", "parallel.tp=4"]
    )
    assert checks.problems(config, to_submit=False) != []


WORLD = """
import json, os
import torch, torch.distributed as dist
import hpcinit
run = hpcinit.init()
total = torch.tensor([run.world.rank + 1.0])
dist.all_reduce(total)
here = os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_PARTITION"]
print(json.dumps([run.world.rank, run.world.world_size, run.world.local_rank, *here, total.item()]))
"""


def lines(folder: Path, ranks: int) -> list[list[object]]:
    return [json.loads(printed(folder, rank).splitlines()[-1]) for rank in range(ranks)]


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
    assert [line[0] for line in found] == [0, 1, 2, 3, 4] and {line[1] for line in found} == {5}
    assert [line[2] for line in found] == [0, 0, 0, 1, 2] and {line[5] for line in found} == {15.0}
    assert [line[4] for line in found] == ["main", "main", "high", "high", "high"]
    assert len({line[3] for line in found}) == 3 and len({line[3] for line in found[2:]}) == 1
    assert spec.load(folder / "spec.json").world_size == 5
    status = json.loads(hpcinit("status", "--json", folder.name, env=idle_slurm.env).stdout)
    assert status["name"] == "COMPLETED"


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_world_each(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """With worlds=each the components are independent worlds; the files of the second are in component-1 of the run folder.
    The job fails if one of them does."""
    (tmp_path / "train.py").write_text(WORLD + "raise SystemExit(7 * (run.world.world_size == 3))\n")
    words = [*FIRST[1:], SECOND, "worlds=each", "wait=true"]
    done = submit(hpcinit, idle_slurm, *words, "--", "train.py", timeout=400)
    folder = folder_of(done)
    assert done.returncode == 7, done.stderr + (folder / "logs/job.log").read_text()
    one, other = lines(folder, 2), lines(folder / "component-1", 3)
    assert [line[:3] for line in one] == [[0, 2, 0], [1, 2, 0]] and {line[5] for line in one} == {3.0}
    assert [line[:3] for line in other] == [[0, 3, 0], [1, 3, 1], [2, 3, 2]] and {line[5] for line in other} == {6.0}
    assert {line[4] for line in one} == {"main"} and {line[4] for line in other} == {"high"}
    assert [path.name for path in (folder / "component-1/errors").glob("*.json")]
    assert not list((folder / "errors").glob("*.json"))
