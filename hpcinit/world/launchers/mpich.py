"""Ranks started by Hydra, the process manager of MPICH, Intel MPI and MVAPICH, or by another that speaks PMI.

PMI_RANK and PMI_SIZE are PMI's; MPI_LOCALRANKID and MPI_LOCALNRANKS Hydra's (recorded from 4.0.2, Debian 12);
PMI_LOCAL_RANK and PMI_LOCAL_SIZE are what Cray's launcher calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcinit.base.errors import WorldError
from hpcinit.world import World
from hpcinit.world.launchers import rank0_address
from hpcinit.world.parent_step import UNKNOWN, Process, command_lines

# What names one `mpiexec` of Hydra's, on every node: the port at which it listens to its proxies.
#
# Hydra (4.0.2) gives its ranks no job id. Above each rank stands the proxy that started it:
#
#     /usr/bin/hydra_pmi_proxy --control-port n1:35417 --rmk user --launcher ssh ... --proxy-id 1


def control_port(pid: int, proc: Path = Path("/proc")) -> str:
    """'n1:35417' of the proxy above process `pid`; '' where none is to be seen (another launcher, a container)."""
    for line in command_lines(pid, proc):
        words = line.split("\0")
        if "pmi_proxy" in words[0] and "--control-port" in words[:-1]:
            return words[words.index("--control-port") + 1]
    return ""


NAME = "mpich"
VARIABLES = {
    "rank": "PMI_RANK",
    "world_size": "PMI_SIZE",
    "local_rank": "MPI_LOCALRANKID",
    "local_world_size": "MPI_LOCALNRANKS",
}
LOCAL_RANKS = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
LOCAL_SIZES = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
DO = "mpiexec sets it for every rank; start the ranks with mpiexec"
LOST = (
    "mpiexec started {size} ranks, {here} of them on this node, and does not say where rank 0 is: give its host to all "
    "of them (mpiexec -genv MASTER_ADDR ...), or start them with srun"
)
NO_SIZE = (
    "PMIX_RANK is {rank!r} and nothing tells the number of ranks: PMIx keeps it out of the environment; start the "
    "ranks with srun, with Open MPI's mpirun or with torchrun (or say HPCINIT_LAUNCHER=single, for a process alone)"
)


def present(env: Mapping[str, str]) -> bool:
    """`srun --mpi=pmi2` sets PMI_RANK and `srun --mpi=pmix` PMIX_RANK in a Slurm step: these are Slurm's.

    In a Slurm job it takes the local rank, which srun never sets, to see that mpiexec stands in between.
    """
    if "SLURM_JOB_ID" in env or "SLURM_JOBID" in env:
        return "PMI_RANK" in env and any(name in env for name in LOCAL_RANKS)
    return "PMI_RANK" in env or "PMIX_RANK" in env


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """Every value from PMI's and Hydra's variables; the master is known on one node, or where MASTER_ADDR was given.

    Raises WorldError if a value is absent, or if nothing tells where to meet.
    """
    if "PMI_RANK" not in env and "PMIX_RANK" in env:
        raise WorldError(NO_SIZE.format(rank=env["PMIX_RANK"]))
    names = VARIABLES | {"local_rank": _first(env, LOCAL_RANKS), "local_world_size": _first(env, LOCAL_SIZES)}
    mpiexec = control_port(process.pid) if process.pid else ""
    told = rank0_address.Rank0Address(
        NAME,
        # Several mpiexec may run in one Slurm job, or with none on the same nodes.
        job=env.get("PMI_JOBID") or "-".join(filter(None, (env.get("SLURM_JOB_ID"), mpiexec))),
        own=env.get("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", ""),
        guess="",
        lost=LOST,
    )
    return rank0_address.world_of(env, names, DO, told)


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in env), names[0])
