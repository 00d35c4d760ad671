"""Process groups that differ from the job's: noticed by hpcinit.init(), and shown by status and why, on the real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpcinit.records import world_size
from hpcinit.records.components import Component
from hpcinit.records.spec import Program, Spec
from hpcinit.records.world_size import WrongWorldSize
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit

# As a user's wrapper. The launcher's name is in a variable, so that no check before the queue reads it.
WRAPPER = f"module=torch.distributed.run; exec '{sys.executable}' -m $module"
TRAINS = """
import hpcinit
with hpcinit.session() as run:
    print("up", run.rank, run.world_size, flush=True)
"""


def wrapped(tmp_path: Path, arguments: str) -> str:
    """Return the path of a wrapper script that starts torchrun with these arguments."""
    script = tmp_path / "wrap.sh"
    script.write_text(f"#!/bin/bash\n{WRAPPER} {arguments}\n")
    script.chmod(0o755)
    return "./wrap.sh"


def log(folder: Path, rank: int = 0) -> str:
    return (folder / f"logs/rank-{rank}.log").read_text()


@pytest.mark.slurm
def test_a_torchrun_in_each_rank(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Two torchruns of two ranks in a job of two ranks end COMPLETED; the log of rank 1, status and why show it."""
    (tmp_path / "train.py").write_text(TRAINS)
    wrapper = wrapped(tmp_path, "--standalone --nproc-per-node=2 train.py")
    done = submit(hpcinit, slurm, "nodes=1", "ranks_per_node=2", "wait=true", "--", wrapper)
    folder = folder_of(done)
    said = "a process group of 2 ranks in a job of 2 ranks"
    assert f"hpcinit: warning: {said} (1 node x 2 ranks): each such group is a separate training run. " in log(
        folder, 1
    )
    status = hpcinit("status", folder.name, env=slurm.env).stdout
    assert "COMPLETED" in status and said in status
    assert f"warning: {said}" in hpcinit("why", folder.name, env=slurm.env).stdout
    (warning,) = json.loads(hpcinit("status", "--json", folder.name, env=slurm.env).stdout)["warnings"]
    assert warning.startswith(said) and "submit the program itself (-- train.py)" in warning


@pytest.mark.more
@pytest.mark.slurm
def test_init_in_a_smaller_group(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """hpcinit.init() in a group of 2 of the job's 4 ranks prints the warning and records it, however short the run is."""
    (tmp_path / "train.py").write_text(TRAINS)
    wrapper = wrapped(tmp_path, "--standalone --nproc-per-node=2 train.py")
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=2", "wait=true", "--", wrapper)
    folder = folder_of(done)
    said = "a process group of 2 ranks in a job of 4 ranks (2 nodes x 2 ranks): each such group is a separate training run. "
    assert f"hpcinit: warning: {said}Started by torchrun (pid " in log(folder)
    assert "of 2 ranks in a job of 4 ranks" in hpcinit("status", folder.name, env=slurm.env).stdout


@pytest.mark.more
@pytest.mark.slurm
def test_a_torchrun_in_each_rank_of_two_components(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """The job's ranks are those of both components of a heterogeneous job."""
    (tmp_path / "train.py").write_text(TRAINS)
    wrapper = wrapped(tmp_path, "--standalone --nproc-per-node=2 train.py")
    shape = ["nodes=1", "ranks_per_node=1", "hetjob=[{nodes: 1, ranks_per_node: 2, partition: high}]"]
    done = submit(
        hpcinit, slurm, *shape, "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "wait=true", "--", wrapper
    )
    found = world_size.read(folder_of(done))
    assert found and "of 2 ranks in a job of 3 ranks (1 node x 1 rank + 1 node x 2 ranks)" in str(found), log(
        folder_of(done)
    )


@pytest.mark.more
@pytest.mark.slurm
def test_groups_that_span_the_job(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """One torchrun per node for all nodes, with more ranks than tasks, is no finding, and neither is a plain wrapper."""
    (tmp_path / "train.py").write_text(TRAINS)
    spans = "--nnodes=2 --nproc-per-node=2 --node-rank=$SLURM_NODEID --master-addr=n1 --master-port=29577 train.py"
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=1", "wait=true", "--", wrapped(tmp_path, spans))
    assert done.returncode == 0 and world_size.read(folder_of(done)) is None
    plain = submit(
        hpcinit,
        slurm,
        "nodes=2",
        "ranks_per_node=2",
        "wait=true",
        "--",
        "sh",
        "-c",
        f"exec '{sys.executable}' train.py",
    )
    assert plain.returncode == 0 and world_size.read(folder_of(plain)) is None


def test_a_heterogeneous_job() -> None:
    """Its world has the ranks of all components, and one rank per node only if no component has more."""

    def spec(*parts: Component) -> Spec:
        return Spec("x", "local", 3, 2, Program("command", "x"), "/", "0" * 32, components=parts)

    whole, launchers = spec(Component(1, 2), Component(2, 1)), spec(Component(1, 1), Component(2, 1))
    assert not world_size.differs(whole, 4, 3)
    assert world_size.differs(whole, 6, 3) and not world_size.differs(launchers, 6, 3)


def test_the_first_finding_is_recorded(tmp_path: Path) -> None:
    """A second finding does not replace the first one, and an unreadable file is no finding."""
    found = WrongWorldSize("torchrun", 2, "n1", 71, 4, "2 nodes x 2 ranks")
    for size in (found, WrongWorldSize("torchrun", 3, "n1", 72, 4, "2 nodes x 2 ranks")):
        world_size.record(tmp_path, size)
    assert world_size.read(tmp_path) == found and len(list(tmp_path.glob(".world-size*"))) == 0
    (tmp_path / "world-size.json").write_text("[1]")
    assert world_size.read(tmp_path) is None
