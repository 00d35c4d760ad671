"""Process groups that differ from the job's: noticed in the job, and shown by status and why, on the real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpcinit.records import world_size
from hpcinit.records.components import Component
from hpcinit.records.spec import Program, Spec
from hpcinit.runtime.world_size_monitor import find
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit
from tests.waiting import until

ROOT = Path(__file__).parent.parent

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


def log(folder: Path) -> str:
    return (folder / "logs/rank-0.log").read_text()


@pytest.mark.slurm
def test_a_torchrun_in_each_rank(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Two torchruns of two ranks in a job of two ranks end COMPLETED, and the log, status and why show the two groups."""
    wrapper = wrapped(tmp_path, "--standalone --nproc-per-node=2 --no-python sleep 20")
    done = submit(hpcinit, slurm, "nodes=1", "ranks_per_node=2", "wait=true", "--", wrapper)
    folder = folder_of(done)
    said = "2 process groups of 2 ranks in a job of 2 ranks"
    assert f"hpcinit: warning: {said} (1 node x 2 ranks): each such group is a separate training run. " in log(folder)
    status = hpcinit("status", folder.name, env=slurm.env).stdout
    assert "COMPLETED" in status and said in status
    assert f"warning: {said}" in hpcinit("why", folder.name, env=slurm.env).stdout
    (warning,) = json.loads(hpcinit("status", "--json", folder.name, env=slurm.env).stdout)["warnings"]
    assert warning.startswith(said) and "submit the program itself (-- train.py)" in warning


@pytest.mark.slurm
def test_init_in_a_smaller_group(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """hpcinit.init() in a group of 2 of the job's 4 ranks prints the warning and records it, however short the run is."""
    (tmp_path / "train.py").write_text(TRAINS)
    wrapper = wrapped(tmp_path, "--standalone --nproc-per-node=2 train.py")
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=2", "wait=true", "--", wrapper)
    folder = folder_of(done)
    said = "a process group of 2 ranks in a job of 4 ranks (2 nodes x 2 ranks): each such group is a separate training run. "
    assert f"hpcinit: warning: {said}Started by torchrun (pid " in log(folder)
    # The monitor may have been first, which sees all groups of the node.
    assert "of 2 ranks in a job of 4 ranks" in hpcinit("status", folder.name, env=slurm.env).stdout


@pytest.mark.slurm
def test_a_torchrun_in_each_rank_of_two_components(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """The job's ranks are those of both components of a heterogeneous job."""
    wrapper = wrapped(tmp_path, "--standalone --nproc-per-node=2 --no-python sleep 20")
    shape = ["nodes=1", "ranks_per_node=1", "hetjob=[{nodes: 1, ranks_per_node: 2, partition: high}]"]
    done = submit(
        hpcinit, slurm, *shape, "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "wait=true", "--", wrapper
    )
    found = world_size.read(folder_of(done))
    assert found and "of 2 ranks in a job of 3 ranks (1 node x 1 rank + 1 node x 2 ranks)" in str(found), log(
        folder_of(done)
    )


@pytest.mark.slurm
def test_groups_that_span_the_job(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """One torchrun per node for all nodes, with more ranks than tasks, is no finding, and neither is a plain wrapper."""
    spans = "--nnodes=2 --nproc-per-node=2 --node-rank=$SLURM_NODEID --master-addr=n1 --master-port=29577 --no-python sleep 9"
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=1", "wait=true", "--", wrapped(tmp_path, spans))
    assert done.returncode == 0 and world_size.read(folder_of(done)) is None
    plain = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=2", "wait=true", "--", "sh", "-c", "sleep 9")
    assert plain.returncode == 0 and world_size.read(folder_of(plain)) is None


def process(proc: Path, pid: int, folder: Path, **env: str) -> None:
    below = proc / str(pid)
    below.mkdir(parents=True, exist_ok=True)
    values = {"HPCINIT_RUN": str(folder), **env}
    (below / "environ").write_bytes(b"\0".join(f"{name}={value}".encode() for name, value in values.items()) + b"\0")


def spec(nodes: int = 2, ranks_per_node: int = 2) -> Spec:
    return Spec("x", "local", nodes, ranks_per_node, Program("command", "x"), "/", "0" * 32)


TORCH = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "RANK": "0", "WORLD_SIZE": "4", **TORCH}, "openmpi"),
        ({"RANK": "0", "WORLD_SIZE": "2", **TORCH}, "another launcher"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **TORCH}, None),  # as hpcinit itself sets them
        ({"RANK": "x", "WORLD_SIZE": "2", **TORCH}, None),
        ({}, None),
    ],
    ids=["mpirun", "unnamed launcher", "hpcinit", "invalid", "no rank"],
)  # fmt: skip
def test_environments(tmp_path: Path, env: dict[str, str], launcher: str | None) -> None:
    """A group is found by its launcher's variables; other runs' processes and invalid values are skipped."""
    process(tmp_path / "proc", 70, tmp_path / "other", RANK="0", WORLD_SIZE="2", **TORCH)
    process(tmp_path / "proc", 71, tmp_path, **env)
    found = find(tmp_path, spec(), "n1", tmp_path / "proc")
    assert (found and (found.launcher, found.world_size, found.pid)) == (launcher and (launcher, 2, 71))


def test_a_heterogeneous_job(tmp_path: Path) -> None:
    """Its world has the ranks of all components, and one rank per node only if no component has more."""
    parts = (Component(1, 2), Component(2, 1))
    whole = replace(spec(3, 2), components=parts)
    process(tmp_path / "proc", 71, tmp_path, RANK="0", WORLD_SIZE="4", **TORCH)
    assert find(tmp_path, whole, "n1", tmp_path / "proc") is None
    process(tmp_path / "proc", 71, tmp_path, RANK="0", WORLD_SIZE="6", **TORCH)
    found = find(tmp_path, whole, "n1", tmp_path / "proc")
    said = "a process group of 6 ranks in a job of 4 ranks (1 node x 2 ranks + 2 nodes x 1 rank): "
    assert str(found).startswith(said)
    launchers = replace(spec(3, 1), components=(Component(1, 1), Component(2, 1)))
    assert world_size.differs(whole, 6, 3) and not world_size.differs(launchers, 6, 3)


def test_the_first_finding_is_recorded(tmp_path: Path) -> None:
    """A second finding does not replace the first one, and an unreadable file is no finding."""
    process(tmp_path / "proc", 71, tmp_path, RANK="0", WORLD_SIZE="2", **TORCH)
    found = find(tmp_path, spec(), "n1", tmp_path / "proc")
    assert found and world_size.record(tmp_path, found) and not world_size.record(tmp_path, found)
    assert world_size.read(tmp_path) == found and len(list(tmp_path.glob(".world-size*"))) == 0
    (tmp_path / "world-size.json").write_text("[1]")
    assert world_size.read(tmp_path) is None


PROGRAM = """
import os, sys
from pathlib import Path
from hpcinit.runtime.world_size_monitor import start
from hpcinit.world import World
from tests.test_wrong_world_size import spec
start(Path(sys.argv[1]), spec(), World("slurm", 0, 4, 0, 2, 0, ("n1", "n2"), "n1", (1,)))
try:
    os.wait()
except ChildProcessError:
    print("no child", flush=True)
sys.stdin.read()
"""


def test_the_monitor_ends_with_its_process(tmp_path: Path) -> None:
    """The monitor is no child of the program, keeps none of its streams open, and ends as soon as the program does."""
    env = {**os.environ, "HPCINIT_RUN": str(tmp_path), "PYTHONPATH": str(ROOT)}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], env=env, **streams)

    def monitors() -> list[int]:
        return [
            found.pid
            for found in psutil.process_iter(["cmdline", "environ"])
            if (found.info["cmdline"] or [""])[0].startswith("hpcinit: world size monitor")
            and (found.info["environ"] or {}).get("HPCINIT_RUN") == str(tmp_path)
        ]

    until(monitors, 30)
    assert program.communicate("", timeout=150)[0] == "no child\n"
    until(lambda: not monitors(), 10)
