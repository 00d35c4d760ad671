"""Ranks started by Open MPI's mpirun. MPI names no meeting point: MASTER_ADDR must be given.

Variables: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcinit.facts import ports
from hpcinit.facts.errors import WorldError
from hpcinit.facts.world import World, number

NAME = "mpi"
DO = "mpirun sets it for every rank; start the ranks with mpirun"


def present(env: Mapping[str, str]) -> bool:
    return "OMPI_COMM_WORLD_RANK" in env


def read(env: Mapping[str, str]) -> World:
    """Every value from Open MPI's variables, but the master's address where there are several nodes."""
    size = number(env, "OMPI_COMM_WORLD_SIZE", DO)
    local_size = number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", DO)
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else "")
    if not address:
        raise WorldError(
            f"mpirun started {size} ranks, {local_size} of them on this node, and does not say where rank 0 "
            "is: give its host to all of them (mpirun -x MASTER_ADDR=...), or start them with srun"
        )
    job = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE", "")
    return World(
        launcher=NAME,
        rank=number(env, "OMPI_COMM_WORLD_RANK", DO),
        world_size=size,
        local_rank=number(env, "OMPI_COMM_WORLD_LOCAL_RANK", DO),
        local_world_size=local_size,
        # Open MPI does not number the nodes (OMPI_COMM_WORLD_NODE_RANK is a rank within the node); by slot,
        # its default, it fills them in order.
        node_rank=number(env, "OMPI_COMM_WORLD_RANK", DO) // local_size,
        hosts=(),
        master_addr=address,
        master_ports=(number(env, "MASTER_PORT", DO),) if "MASTER_PORT" in env else ports.candidates(job),
        job=job,
    )
