"""`python -m hpcinit.world`, under every launcher that this machine has, really started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail

# command: Debian package. `make test` installs them where it may.
MPI_PACKAGES = {"mpirun.openmpi": "openmpi-bin", "mpiexec.hydra": "mpich"}
WORLD = f'"{sys.executable}" -m hpcinit.world'
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def world(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcinit.world", *arguments]
    return subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)


def run(command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    """Return what the command prints; it must succeed."""
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ranks(folder: Path, command: list[str], variable: str, env: Mapping[str, str] | None = None) -> list[Any]:
    """Return the world of each rank that the command starts, by the launcher's own rank variable."""
    run([*command, "sh", "-c", f"{WORLD} > world-${variable}"], folder, env)
    return [json.loads((folder / f"world-{rank}").read_text()) for rank in range(len(list(folder.glob("world-*"))))]


def mpi(command: str) -> str:
    """Return the command, or skip the test with the package to install. With CI=true fail instead, to be noticed."""
    if not shutil.which(command):
        skip_or_fail(f"needs {command}: apt-get install {MPI_PACKAGES[command]}")
    return command


# --- without a launcher


def test_one_json_object_with_every_field() -> None:
    """A single process prints its world as one JSON object, and nothing else."""
    done = world()
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr, found["launcher"]) == (0, "", "single")
    assert list(found) == [
        "document", "version", "launcher", "rank", "world_size", "local_rank", "local_world_size", "node_rank", "hosts", "master_addr",
        "master_ports", "job", "warnings", "master_known", "node_count", "ranks_here",
    ]  # fmt: skip


def test_an_error_is_a_message_and_status_2() -> None:
    """An error prints no JSON and no traceback, but its message on stderr."""
    done = world(env={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "hpcinit: error: this process has no rank (SLURM_STEP_ID is not set), but the job has 8 tasks: start the ranks "
        "with srun, because sbatch and salloc alone start none. For a single process, set HPCINIT_STARTED_BY=single\n"
    )


def test_slurm_by_hand_outside_of_slurm() -> None:
    """A missing variable is named, with exit status 2."""
    done = world(env={"HPCINIT_STARTED_BY": "slurm"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "hpcinit: error: SLURM_JOB_ID is not set, expected a job id, which Slurm sets for every task: "
    )


def test_the_number_of_nodes() -> None:
    """node_count is the number of hosts if they are named, else it is computed from the sizes."""
    recorded = json.loads((Path(__file__).parent / "data/launchers.json").read_text())["hydra 4.0.2"][0]
    assert json.loads(world(env=recorded).stdout)["node_count"] == 1
    found = json.loads(world().stdout)
    assert (len(found["hosts"]), found["node_count"]) == (1, 1)


def test_a_launcher_by_hand() -> None:
    """--started-by and HPCINIT_STARTED_BY choose the launcher; the contradiction is in the JSON."""
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}
    for done in (world("--started-by", "single", env=env), world(env={**env, "HPCINIT_STARTED_BY": "single"})):
        found = json.loads(done.stdout)
        assert found["world_size"] == 1
        assert found["warnings"] == [
            "ignored variables of slurm: SLURM_NTASKS is 8, world_size is 1. hpcinit uses the values of single"
        ]
    assert "expected one of: torchrun, horovod, openmpi, mpich, slurm, env, single" in world("--started-by", "x").stderr


@pytest.mark.unmeasured("checks everything that its process has imported")
def test_without_torch() -> None:
    """The command imports only the standard library and hpcinit, neither torch nor Horovod."""
    code = "import sys; from hpcinit.world import __main__; __main__.main([]); print(*(m.partition('.')[0] for m in sys.modules))"
    names = set(run([sys.executable, "-c", code], Path.cwd()).splitlines()[1].split())
    outside = {
        name for name in names - set(sys.stdlib_module_names) - {"hpcinit", "__main__"} if not name.startswith("_")
    }
    assert not {"torch", "horovod", "numpy", "mpi4py"} & names
    assert outside <= {"sitecustomize", "usercustomize", "distutils"}, outside


# --- launchers


def test_torchrun(tmp_path: Path) -> None:
    """Two workers of a real torchrun are ranks 0 and 1, and use torchrun's address."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    found = ranks(tmp_path, command, "RANK")
    assert [(w["launcher"], w["rank"], w["local_rank"], w["world_size"], w["node_count"]) for w in found] == [
        ("torchrun", 0, 0, 2, 1), ("torchrun", 1, 1, 2, 1)
    ]  # fmt: skip
    assert len({(w["master_addr"], *w["master_ports"], w["job"]) for w in found}) == 1
    assert all(w["warnings"] == [] for w in found)


@pytest.mark.parametrize(
    ("command", "options", "launcher", "variable"),
    [
        ("mpirun.openmpi", ["--oversubscribe"], "openmpi", "OMPI_COMM_WORLD_RANK"),
        ("mpiexec.hydra", [], "mpich", "PMI_RANK"),
    ],
)
def test_mpi(command: str, options: list[str], launcher: str, variable: str, tmp_path: Path) -> None:
    """Three ranks of a real mpirun are 0 to 2 of 3 on one node, and agree on rank 0's address."""
    found = ranks(tmp_path, [mpi(command), *options, "-np", "3"], variable, AS_ROOT)
    assert [(w["launcher"], w["rank"], w["local_rank"]) for w in found] == [(launcher, rank, rank) for rank in range(3)]
    for each in found:
        assert (each["world_size"], each["local_world_size"], each["master_addr"]) == (3, 3, "127.0.0.1")
        assert each["master_known"] and each["warnings"] == []
    assert len({(*w["master_ports"], w["job"]) for w in found}) == 1


# --- on the real Slurm


@dataclass(frozen=True)
class Place:
    """One rank as Slurm shows it: srun's label, the kernel's host name, and the output of hpcinit.world."""

    label: int | None
    host: str
    output: str

    @property
    def world(self) -> Any:
        return json.loads(self.output)


PRINT_WORLD = f"sh -c 'echo \"$(uname -n) $({WORLD} 2>&1)\"'"


def launched(slurm: MiniSlurm, folder: Path, allocation: str, script: str, output: str = "out") -> list[Place]:
    """Return what `sbatch ALLOCATION` of the script wrote to `output`, sorted by srun's label."""
    (folder / "job").write_text(f"#!/bin/sh\n{script}\n")
    run(["sbatch", "--wait", "--output=out", *allocation.split(), "job"], folder, slurm.env)
    text = (folder / output).read_text()
    places = []
    for line in text.splitlines():
        label, _, rest = line.partition(": ")
        labeled = label.strip().isdigit()  # the labels of srun; torchrun prints empty lines too
        host, _, output = (rest if labeled else line).partition(" ")
        places.append(Place(int(label) if labeled else None, host, output))
    return sorted(places, key=lambda place: place.label or 0)


HOSTS = "printf 'n3\\nn1\\nn3\\nn2\\n' > hosts; export SLURM_HOSTFILE=$PWD/hosts; "
LIVE = {
    "block": ("-N2 --ntasks-per-node=2", f"srun --label {PRINT_WORLD}"),
    "cyclic": ("-N3 --ntasks-per-node=2 --distribution=cyclic", f"srun --label {PRINT_WORLD}"),
    "uneven": ("-N3 -n4", f"srun --label {PRINT_WORLD}"),
    "subset": ("-N4 --ntasks-per-node=2", f"srun -w n2,n4 -N2 -n4 --label {PRINT_WORLD}"),
    "arbitrary": ("-N3 -n4", f"{HOSTS}srun --distribution=arbitrary --label {PRINT_WORLD}"),
    "heterogeneous": ("-w n4 -n2 : -w n1,n2 -n2", f"srun --het-group=0,1 --label {PRINT_WORLD}"),
    "one component": ("-n1 : -w n2,n3 -n3", f"srun --het-group=1 --label {PRINT_WORLD}"),
    "preserve-env": ("-N2 -n4", f"srun --preserve-env -N1 -n2 --label {PRINT_WORLD}"),
    "array": ("-N2 -n2 --array=3", f"srun --label {PRINT_WORLD}"),
}


@pytest.mark.slurm
@pytest.mark.parametrize("shape", LIVE)
def test_slurm(shape: str, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Rank, host, sizes and rank 0's host match srun's labels and the kernel."""
    places = launched(slurm, tmp_path, *LIVE[shape])
    assert len(places) > 1 and [place.label for place in places] == list(range(len(places)))
    for place in places:
        found = place.world
        mates = [each.label for each in places if each.host == place.host]
        assert (found["rank"], found["world_size"]) == (place.label, len(places))
        assert (found["local_rank"], found["local_world_size"]) == (mates.index(place.label), len(mates))
        assert found["hosts"][found["node_rank"]] == place.host
        assert found["node_count"] == len({each.host for each in places}) == len(found["hosts"])
        assert (found["master_addr"], found["master_known"], found["warnings"]) == (places[0].host, True, [])
    assert len({place.world["job"] for place in places}) == 1


@pytest.mark.slurm
def test_slurm_where_rank_0s_host_is_told_nowhere(slurm: MiniSlurm, tmp_path: Path) -> None:
    """--distribution=arbitrary with a nodelist: rank 0 uses its own host, and master_known is False for all ranks."""
    script = f"srun --distribution=arbitrary -w n3,n1,n3,n2 -n4 --label {PRINT_WORLD}"
    places = launched(slurm, tmp_path, "-N3 -n4", script)
    assert [place.host for place in places] == ["n3", "n1", "n3", "n2"]
    assert places[0].world["master_addr"] == "n3"
    assert [place.world["master_known"] for place in places] == [False] * 4


NESTED = "srun --overlap sh -c '[ $SLURM_PROCID != 1 ] || "
BATCH = ("SLURM_STEP_ID is not set", "SLURM_STEP_ID is -5: a batch script")  # until Slurm 24.11, and in 26.05
WITHOUT_RANK = {  # allocation, script, output file, and the messages of Slurm's versions, separated by |
    "batch script": ("-N2 -n4", PRINT_WORLD, "out", "but the job has 4 tasks: "),
    "nodes only": ("-N2", PRINT_WORLD, "out", "but the job has 2 nodes: "),
    "interactive": (
        "-N2 -n4",
        f"srun --interactive --preserve-env {PRINT_WORLD}",
        "out",
        "SLURM_STEP_ID is 4294967290: an int|SLURM_STEP_ID is -6: an int",  # Slurm 26.05
    ),
    "nested": (
        "-N2 -n2",
        f"{NESTED}sbatch --wait -N2 -n2 --output=nested print_world'",
        "nested",
        f".batch, a batch script, not in |{BATCH[1]}",
    ),
    "nested salloc": (
        "-N2 -n2",
        f"{NESTED}salloc -N2 -n2 ./print_world > nested'",
        "nested",
        "SLURM_STEP_ID is inherited: Slurm ",
    ),
}


@pytest.mark.slurm
@pytest.mark.parametrize("shape", WITHOUT_RANK)
def test_no_rank_on_slurm(shape: str, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Batch scripts and shells, nested ones of the same shape too, get the advice to use srun."""
    allocation, script, output, message = WITHOUT_RANK[shape]
    (tmp_path / "print_world").write_text(f"#!/bin/sh\n{PRINT_WORLD}\n")
    (tmp_path / "print_world").chmod(0o755)
    (place,) = launched(slurm, tmp_path, allocation, script, output)
    assert any(text in place.output for text in message.split("|"))
    assert "start the ranks with srun" in place.output


@pytest.mark.slurm
def test_a_stale_rank_on_slurm(slurm: MiniSlurm, tmp_path: Path) -> None:
    """A RANK of the submitting shell reaches the tasks, is reported, and is not used."""
    script = f"export RANK=7 WORLD_SIZE=8 MASTER_ADDR=old MASTER_PORT=1\nsrun --label {PRINT_WORLD}"
    for place in launched(slurm, tmp_path, "-N2 -n2", script):
        assert place.world["rank"] == place.label
        assert f"RANK is 7, SLURM_PROCID is {place.label}" in place.world["warnings"][0]
        assert "MASTER_ADDR is old, rank 0's host is n1" in place.world["warnings"][1]


@pytest.mark.slurm
def test_torchrun_inside_srun(slurm: MiniSlurm, tmp_path: Path) -> None:
    """Two agents with two workers each are torchrun's four ranks on two nodes; Slurm's two tasks are reported."""
    agent = "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=n1:29411"
    script = f"srun '{sys.executable}' {agent} --no-python sh -c '{WORLD} > world-$RANK'"
    launched(slurm, tmp_path, "-N2 --ntasks-per-node=1", script)
    found = [json.loads((tmp_path / f"world-{rank}").read_text()) for rank in range(4)]
    assert [(w["launcher"], w["rank"], w["local_rank"], w["node_count"]) for w in found] == [
        ("torchrun", rank, rank % 2, 2) for rank in range(4)
    ]
    assert all("SLURM_NTASKS is 2, WORLD_SIZE is 4" in w["warnings"][0] for w in found)


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("command", "launcher", "variable"),
    [("mpirun.openmpi", "openmpi", "OMPI_COMM_WORLD_RANK"), ("mpiexec.hydra", "mpich", "PMI_RANK")],
)
def test_mpi_inside_an_allocation(command: str, launcher: str, variable: str, slurm: MiniSlurm, tmp_path: Path) -> None:
    """mpirun in a batch script on two nodes: there are MPI's four ranks, a guess for rank 0's host, and a warning about Slurm's values."""
    script = f"{mpi(command)} -np 4 sh -c 'echo \"$(uname -n) $({WORLD})\" > world-${variable}'"
    (tmp_path / "out").write_text("")
    allow = "".join(f"export {name}={value}\n" for name, value in AS_ROOT.items())
    launched(slurm, tmp_path, "-N2 --ntasks-per-node=2", allow + script)
    lines = [(tmp_path / f"world-{rank}").read_text().partition(" ") for rank in range(4)]
    found = [json.loads(said) for _, _, said in lines]
    assert [(w["launcher"], w["rank"], w["world_size"], w["local_rank"]) for w in found] == [
        (launcher, rank, 4, rank % 2) for rank in range(4)
    ]
    assert {w["master_addr"] for w in found} == {lines[0][0]} and not any(w["master_known"] for w in found)
    assert len({(*w["master_ports"], w["job"]) for w in found}) == 1
    assert "ignored variables of slurm: SLURM_PROCID is" in found[3]["warnings"][0]
