"""Ranks started by Hydra, the process manager of MPICH, Intel MPI and MVAPICH, or by another one that speaks PMI.

PMI_RANK and PMI_SIZE are PMI's. MPI_LOCALRANKID and MPI_LOCALNRANKS are Hydra's (recorded from 4.0.2, Debian 12), and
Cray's launcher calls them PMI_LOCAL_RANK and PMI_LOCAL_SIZE.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcinit.base.errors import WorldError
from hpcinit.world import World
from hpcinit.world.launchers import rank0_address
from hpcinit.world.parent_step import UNKNOWN, Process, command_lines

# The name of one `mpiexec` of Hydra on every node is the port at which it listens to its proxies.
#
# Hydra (4.0.2) gives its ranks no job id. The parent of each rank is the proxy that started it:
#
#     /usr/bin/hydra_pmi_proxy --control-port n1:35417 --rmk user --launcher ssh ... --proxy-id 1


def control_port(pid: int, proc: Path = Path("/proc")) -> str:
    """Return 'n1:35417' of the proxy above process `pid`, or '' if there is none (another launcher, a container)."""
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
    "mpiexec started {size} ranks, {here} of them on this node, but does not set rank 0's host: set it for all "
    "of them (mpiexec -genv MASTER_ADDR ...), or start them with srun"
)
NO_SIZE = (
    "PMIX_RANK is {rank!r}, but the number of ranks is unknown, because PMIx does not put it into the environment: "
    "start the ranks with srun, with Open MPI's mpirun or with torchrun "
    "(or set HPCINIT_STARTED_BY=single, for one process)"
)


def present(env: Mapping[str, str]) -> bool:
    """Return whether mpiexec started this process. In a Slurm step, PMI_RANK and PMIX_RANK can be srun's (--mpi=...).

    So in a Slurm job the local rank must be set too, which srun never does.
    """
    if "SLURM_JOB_ID" in env or "SLURM_JOBID" in env:
        return "PMI_RANK" in env and any(name in env for name in LOCAL_RANKS)
    return "PMI_RANK" in env or "PMIX_RANK" in env


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """Return the world from PMI's and Hydra's variables; rank 0's host is certain on one node, or with MASTER_ADDR.

    Raise WorldError if a value is absent, or if there is no address for the rendezvous.
    """
    if "PMI_RANK" not in env and "PMIX_RANK" in env:
        raise WorldError(NO_SIZE.format(rank=env["PMIX_RANK"]))
    names = VARIABLES | {"local_rank": _first(env, LOCAL_RANKS), "local_world_size": _first(env, LOCAL_SIZES)}
    mpiexec = control_port(process.pid) if process.pid else ""
    source = rank0_address.Rank0Address(
        NAME,
        # Several mpiexec may run in one Slurm job, or on the same nodes without a job.
        job=env.get("PMI_JOBID") or "-".join(filter(None, (env.get("SLURM_JOB_ID"), mpiexec))),
        own=env.get("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", ""),
        guess="",
        lost=LOST,
    )
    return rank0_address.world_of(env, names, DO, source)


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in env), names[0])
