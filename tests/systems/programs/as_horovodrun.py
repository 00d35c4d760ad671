"""`srun python as_horovodrun.py HOST PORT command...`: a rank as horovodrun would start it.

A fake of Horovod's launcher, which is not installed. Each task of the step gets the variables that a real
horovodrun 0.28.1 set (tests/data/launchers.json), and none of Slurm's: horovodrun starts its ranks by ssh.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    host, port, *command = sys.argv[1:]
    slurm = os.environ
    size, here = int(slurm["SLURM_NTASKS"]), len(slurm["SLURM_GTIDS"].split(","))
    told = {
        "RANK": slurm["SLURM_PROCID"],
        "SIZE": size,
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_SIZE": here,
        "CROSS_RANK": slurm["SLURM_NODEID"],
        "CROSS_SIZE": size // here,
        "HOSTNAME": slurm["SLURMD_NODENAME"],
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": host,
        "GLOO_RENDEZVOUS_PORT": port,
    }
    kept = {name: value for name, value in slurm.items() if not name.startswith(("SLURM", "PMI"))}
    os.execve(command[0], command, kept | {f"HOROVOD_{name}": str(value) for name, value in told.items()})


if __name__ == "__main__":
    main()
