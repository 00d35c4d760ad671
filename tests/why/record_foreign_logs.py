"""`python -m tests.why.record_foreign_logs FOLDER [LAUNCHER ...]`: record logs of jobs that hpcinit does not start.

Runs tests/chaos/exit_faults.py with torch alone, four ranks, on a real Slurm of this machine (root):
FOLDER/LAUNCHER-FAULT.log is what a user has in slurm-123.out. tests/data/foreign has the recorded logs, in which
the paths of the recording machine are replaced.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.chaos import exit_faults
from tests.minislurm import MiniSlurm

PROGRAM = Path(exit_faults.__file__)
BIN = Path(sys.executable).parent
RANK = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=n1 MASTER_PORT=$((20000 + SLURM_JOB_ID)); "
    'exec "$0" "$@"'
)
SRUN = "srun -l --kill-on-bad-exit=1"
NODES = ("-w", "n1,n2", "-N2")
PORT = "$((20000 + SLURM_JOB_ID))"
AGENTS = f"torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=n1:{PORT}"
LAUNCHERS = {
    "srun": (*NODES, "--ntasks-per-node=2", f"{SRUN} bash -c '{RANK}' python"),
    "torchrun": ("-N1", "-n1", "torchrun --standalone --nproc-per-node=4"),
    "nodes": (*NODES, "--ntasks-per-node=1", f"srun {AGENTS}"),
    "megatron": (*NODES, "--ntasks-per-node=1", f"srun {AGENTS} --tee 3"),
    "accelerate": (
        *("-N1", "-n1"),
        f"accelerate launch --multi_gpu --num_processes=4 --num_machines=1 --main_process_port={PORT}",
    ),
    "deepspeed": ("-N1", "-n1", f"deepspeed --num_gpus=4 --master_port={PORT}"),
    "lightning": (*NODES, "--ntasks-per-node=2", f"{SRUN} python"),
}
KINDS = {"megatron": "megatron", "lightning": "lightning"}  # else 'plain'
SOME = ("exception", "sigkill", "sigterm", "os-exit", "loop", "broadcast")  # of launchers other than the first two
FAULTS = {launcher: tuple(exit_faults.FAULTS) if launcher in ("srun", "torchrun") else SOME for launcher in LAUNCHERS}
PATHS = re.compile(r"(?:/[\w.+-]+)+/(?=lib/python3|bin/|exit_faults)")


def record(slurm: MiniSlurm, folder: Path, launcher: str, fault: str) -> None:
    *options, line = LAUNCHERS[launcher]
    script = folder / f"{launcher}-{fault}.sh"
    environment = f'export PATH={BIN}:"$PATH" OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu'
    script.write_text(f"#!/bin/bash\n{environment}\n{line} {PROGRAM} {fault} {KINDS.get(launcher, 'plain')}\n")
    log = folder / f"{launcher}-{fault}.log"
    command = ["sbatch", "--wait", "-t5", *options, f"--output={log}", f"--chdir={folder}", str(script)]
    subprocess.run(command, env={**os.environ, **slurm.env}, capture_output=True, timeout=900, check=False)
    log.write_text(PATHS.sub("/home/me/", log.read_text(errors="replace")))
    script.unlink()


def main(argv: Sequence[str]) -> None:
    folder = Path(argv[0]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["HOME"] = str(folder)
    with MiniSlurm(nodes=4, gpus=8, name=f"record-{os.getpid()}") as slurm, ThreadPoolExecutor(3) as pool:
        for launcher in argv[1:] or LAUNCHERS:
            list(pool.map(partial(record, slurm, folder, launcher), FAULTS[launcher]))


if __name__ == "__main__":
    main(sys.argv[1:])
