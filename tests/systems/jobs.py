"""Run the programs of this folder: as a submission, or with several launchers, and collect their ranks' results."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit
from tests.test_world_command import AS_ROOT, mpi

PROGRAMS = Path(__file__).parent / "programs"
Found = dict[str, dict[str, list[dict[str, Any]]]]
TOLERANCE = 1e-5  # of float32 sums in another order


# The launcher is not the subject of these programs: one process per node imports what its ranks need.
FORK = ("launch=fork", "launch.preload=[torch,torch._inductor.compile_fx,deepspeed]")


def said(folder: Path, number: int) -> list[dict[str, Any]]:
    """Return the result of each rank."""
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(number)]


def submitted(
    hpcinit: Run, slurm: MiniSlurm, program: str, number: int, folder: Path, *words: str, args: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Submit the program to 2 nodes with `number` ranks; return the result of each rank."""
    words = ("nodes=2", f"ranks_per_node={number // 2}", "wait=true", *FORK, *words)
    done = submit(hpcinit, slurm, *words, "--", str(PROGRAMS / program), str(folder), *args, timeout=280)
    assert done.returncode == 0, (folder_of(done) / "logs/rank-0.log").read_text()[-4000:] + done.stderr
    return said(folder, number)


def off(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def alike(found: list[dict[str, Any]], *names: str) -> None:
    for name in names:
        assert [rank[name] for rank in found] == [found[0][name]] * len(found), name


# Launchers, on 2 nodes x 2 ranks.

PYTHON = shlex.quote(sys.executable)
TORCHRUN = "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
SRUN = "srun -N2 -n4 --ntasks-per-node=2"


def quoted(program: str) -> str:
    return shlex.quote(str(PROGRAMS / program))


def with_srun(program: str) -> str:
    return f"{SRUN} {PYTHON} {program}"


def with_torchrun(program: str) -> str:
    return f"srun -N2 -n2 --ntasks-per-node=1 {PYTHON} {TORCHRUN} --rdzv-endpoint=$SLURMD_NODENAME:29471 {program}"


def with_horovod(program: str) -> str:
    """Return the command for a fake of Horovod's launcher, which sets the variables that the real one sets."""
    return f"{SRUN} {PYTHON} {quoted('as_horovodrun.py')} $SLURMD_NODENAME 29472 {PYTHON} {program}"


def with_mpirun(program: str) -> str:
    return f"{mpi('mpirun.openmpi')} -np 4 {PYTHON} {program}"


def launched(slurm: MiniSlurm, folder: Path, ways: dict[str, Callable[[str], str]], programs: Sequence[str]) -> Found:
    """Run launches.py with each launcher in turn in one allocation.

    Return the results of the 4 ranks per program and launcher.
    """
    lines = ["#!/bin/sh", "set -e", "export OMP_NUM_THREADS=1", *(f"export {k}={v}" for k, v in AS_ROOT.items())]
    for launcher, line in ways.items():
        for program in programs:
            (folder / launcher / program).mkdir(parents=True)
        # hpcinit.run, because Python's exit may abort a successful rank (hpcinit/runtime/interpreter_exit.py).
        lines.append(line(f"-m hpcinit.run {quoted('launches.py')} {folder / launcher}"))
    # Not sbatch --wait, which polls the job at growing intervals.
    lines.insert(1, "trap 'echo $? > ended.tmp; mv ended.tmp ended' EXIT")
    (folder / "job").write_text("\n".join(lines) + "\n")
    (folder / "out").touch()
    command = ["sbatch", "-N2", "--ntasks-per-node=2", "--time=5", f"--output={folder / 'out'}", "job"]
    env = {**os.environ, **slurm.env}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 280
    while not (folder / "ended").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (folder / "ended").exists() and (folder / "ended").read_text() == "0\n", (folder / "out").read_text()[-4000:]
    found = {program: {way: said(folder / way / program, 4) for way in ways} for program in programs}
    for launcher, ranks in ((way, ranks) for each in found.values() for way, ranks in each.items()):
        assert [(r["launcher"], r["rank"], r["local_rank"], r["world"]) for r in ranks] == [
            (launcher, rank, rank % 2, 4) for rank in range(4)
        ]
    return found
