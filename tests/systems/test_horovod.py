"""A real Horovod over Gloo and over MPI, on this machine: `make test-horovod`, which builds Horovod first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.base.versions import installed
from tests.systems.horovod_wheel import VERSION
from tests.systems.jobs import PROGRAMS, TOLERANCE, off, said

# Not the script `horovodrun`, whose first line names pip's Python, which has no Horovod.
HOROVODRUN = (sys.executable, "-c", "from horovod.runner.launch import run_commandline; run_commandline()")
GLOO, MPI = (*HOROVODRUN, "--gloo"), (*HOROVODRUN, "--mpi")
MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")
RECORDED = Path(__file__).parents[1] / "data/launchers.json"


def horovodrun(
    program: str, *words: str, by: tuple[str, ...] = ("-m", "hpcinit.run"), launcher: tuple[str, ...] = GLOO, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [*launcher, "-np", "2", sys.executable, *by, str(PROGRAMS / program), *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=200, check=False)


def test_openflamingo_trains(tmp_path: Path) -> None:
    """The ranks of a real horovodrun form one world of two, and train to the same weights with DDP and FSDP."""
    done = horovodrun("flamingo.py", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = said(tmp_path, 2)
    assert [(r["launcher"], r["rank"], r["local_rank"], r["world"]) for r in found] == [
        ("horovod", 0, 0, 2),
        ("horovod", 1, 1, 2),
    ]
    losses = found[0]["ddp"]["losses"]
    assert losses[-2] < losses[0] / 1.5 and losses[-1] < losses[1] / 2, "it learns both of its batches"
    for each in found:
        for wrap in ("ddp", "fsdp"):
            assert each[wrap]["bits"] == found[0][wrap]["bits"]
            assert off(each[wrap]["weights"], found[0]["ddp"]["weights"]) < TOLERANCE
    assert sum(rank["fsdp"]["held"] for rank in found) == len(found[0]["fsdp"]["weights"])


def test_horovod_works_together_with_hpcinit(tmp_path: Path) -> None:
    """hvd.init() and hpcinit agree on rank and size, and each reduces over its own group; Horovod's variables equal those
    recorded for the other tests."""
    assert installed("horovod") == VERSION
    done = horovodrun("with_horovod.py", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = json.loads(RECORDED.read_text())[f"horovodrun {VERSION}"]
    for rank, each in enumerate(said(tmp_path, 2)):
        assert each["theirs"] == [rank, 2, rank, 3.0] and each["ours"] == 3.0
        changing = {"HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_IFACE"}
        expected = {name: text for name, text in recorded[rank].items() if name.startswith("HOROVOD_")}
        assert each["told"].keys() == expected.keys()
        assert {name for name in expected if each["told"][name] != expected[name]} <= changing
        assert each["over"] == {"gloo": True, "mpi": False}


def test_init_starts_horovod(tmp_path: Path) -> None:
    """Under horovodrun, hpcinit.init() calls hvd.init() if the program has not, and both reduce over their own group."""
    done = horovodrun("with_horovod.py", str(tmp_path), "only-hpcinit")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, each in enumerate(said(tmp_path, 2)):
        assert each["theirs"] == [rank, 2, rank, 3.0] and each["ours"] == 3.0


@pytest.mark.parametrize("launcher", [MPI, MPIRUN], ids=["horovodrun", "mpirun"])
def test_horovod_over_mpi(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Over MPI, started by horovodrun or by mpirun, hvd.init() and hpcinit agree on rank and size too."""
    done = horovodrun("with_horovod.py", str(tmp_path), launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, each in enumerate(said(tmp_path, 2)):
        assert each["over"] == {"gloo": False, "mpi": True} and each["launcher"] == "openmpi"
        assert each["theirs"] == [rank, 2, rank, 3.0] and each["ours"] == 3.0


@pytest.mark.parametrize("launcher", [MPI, MPIRUN], ids=["horovodrun", "mpirun"])
def test_init_starts_horovod_over_mpi_if_it_is_named(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Over MPI, hpcinit.init() calls hvd.init() with HPCINIT_STARTED_BY=horovod, and never in another MPI job."""
    done = horovodrun("with_horovod.py", str(tmp_path), "only-hpcinit", launcher=launcher, HPCINIT_STARTED_BY="horovod")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, each in enumerate(said(tmp_path, 2)):
        assert each["over"] == {"gloo": False, "mpi": True} and each["launcher"] == "horovod"
        assert each["theirs"] == [rank, 2, rank, 3.0] and each["ours"] == 3.0
    done = horovodrun("with_horovod.py", str(tmp_path), "only-hpcinit", launcher=launcher)
    assert done.returncode != 0 and "Horovod has not been initialized" in done.stdout + done.stderr


@pytest.mark.parametrize(("launcher", "name"), [(GLOO, "horovod"), (MPIRUN, "openmpi")])
def test_a_rank_mismatch_with_horovod_is_refused(tmp_path: Path, launcher: tuple[str, ...], name: str) -> None:
    """The rank of the real Horovod is compared with the environment's, and a difference is an error."""
    # Without hpcinit.run, which would read the environment before.
    done = horovodrun("with_horovod.py", str(tmp_path), "another", by=(), launcher=launcher)
    for rank in range(2):
        assert (
            f"Horovod is initialized as rank {rank} of 2, but {name} started this process as rank {1 - rank} of 2"
            in done.stdout
        ), done.stderr
