"""Jobs of the systems' programs: as submitted, and by one launcher after the other, with what their ranks found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit
from tests.test_world_command import AS_ROOT, mpi

PROGRAMS = Path(__file__).parent / "programs"
TOLERANCE = 1e-5  # of float32 sums in another order


def said(folder: Path, number: int) -> list[dict[str, Any]]:
    """What each rank found."""
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(number)]


def submitted(
    hpcinit: Run, slurm: MiniSlurm, program: str, number: int, folder: Path, *words: str, args: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """The program as submitted on nodes x 2 ranks, and what each rank found."""
    words = (f"nodes={number // 2}", "ranks_per_node=2", "wait=true", *words)
    done = submit(hpcinit, slurm, *words, "--", str(PROGRAMS / program), str(folder), *args, timeout=280)
    assert done.returncode == 0, (folder_of(done) / "logs/rank-0.log").read_text()[-4000:] + done.stderr
    return said(folder, number)


def off(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def alike(found: list[dict[str, Any]], *names: str) -> None:
    for name in names:
        assert [rank[name] for rank in found] == [found[0][name]] * len(found), name


# --- launchers, on 2 nodes x 2 ranks

PYTHON = sys.executable
TORCHRUN = "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
SRUN = "srun -N2 -n4 --ntasks-per-node=2"


def with_srun(program: str) -> str:
    return f"{SRUN} {PYTHON} {program}"


def with_torchrun(program: str) -> str:
    return f"srun -N2 -n2 --ntasks-per-node=1 {PYTHON} {TORCHRUN} --rdzv-endpoint=$SLURMD_NODENAME:29471 {program}"


def with_horovod(program: str) -> str:
    """Horovod is not installed: what stands in for its launcher sets the variables that a real one was seen to set."""
    return f"{SRUN} {PYTHON} {PROGRAMS / 'as_horovodrun.py'} $SLURMD_NODENAME 29472 {PYTHON} {program}"


def with_mpirun(program: str) -> str:
    return f"{mpi('mpirun.openmpi')} -np 4 {PYTHON} {program}"


def launched(
    slurm: MiniSlurm, folder: Path, name: str, ways: dict[str, Callable[[str], str]]
) -> dict[str, list[dict[str, Any]]]:
    """In one allocation, one launch after the other: by launcher, what each of the 4 ranks found."""
    lines = ["#!/bin/sh", "set -e", "export OMP_NUM_THREADS=1", *(f"export {k}={v}" for k, v in AS_ROOT.items())]
    for launcher, line in ways.items():
        (folder / launcher).mkdir()
        # Not the program alone: Python's own exit may abort a rank that has ended well (hpcinit/runtime/program.py: end).
        lines.append(line(f"-m hpcinit.run {PROGRAMS / name} {folder / launcher}"))
    # Not sbatch --wait, which looks at the job ever more rarely.
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
    found = {launcher: said(folder / launcher, 4) for launcher in ways}
    for launcher, ranks in found.items():
        assert [(r["launcher"], r["rank"], r["local_rank"], r["world"]) for r in ranks] == [
            (launcher, rank, rank % 2, 4) for rank in range(4)
        ]
    return found
