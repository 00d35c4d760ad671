"""Ranks started by Open MPI's mpirun.

Variables: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
Recorded from Open MPI 4.1.4 (Debian 12), with the undocumented OMPI_MCA_orte_*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcinit.world import World
from hpcinit.world.launchers import rank0_address
from hpcinit.world.parent_step import UNKNOWN, Process

NAME = "openmpi"
VARIABLES = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
DO = "mpirun sets it for every rank; start the ranks with mpirun"
LOST = (
    "mpirun started {size} ranks, {here} of them on this node, but does not set rank 0's host: set it for all "
    "of them (mpirun -x MASTER_ADDR=...), or start them with srun"
)
# OMPI_MCA_orte_hnp_uri "1522139136.0;tcp://192.0.2.2,198.19.44.1:46631;tcp6://[fd00::2]:45453": the addresses of
# mpirun, which runs on the first host if it runs in an allocation.
_MPIRUN = re.compile(r"tcp://([0-9.]+)")


def present(env: Mapping[str, str]) -> bool:
    return "OMPI_COMM_WORLD_RANK" in env


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """Return the world from Open MPI's variables; rank 0's host is certain on one node, or if MASTER_ADDR is set.

    Raise WorldError if a value is absent, or if there is no address for the rendezvous.
    """
    mpirun = _MPIRUN.search(env.get("OMPI_MCA_orte_hnp_uri", ""))
    nodes = env.get("OMPI_MCA_orte_num_nodes", "0")
    source = rank0_address.Rank0Address(
        NAME,
        job=env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE", ""),
        own=env.get("PMIX_HOSTNAME", ""),
        guess=mpirun[1] if mpirun else "",
        lost=LOST,
        # Open MPI does not number the nodes (OMPI_COMM_WORLD_NODE_RANK is a rank within the node). By slot, its
        # default, it fills them in order.
        node_count=int(nodes) if nodes.isdigit() else 0,
    )
    return rank0_address.world_of(env, VARIABLES, DO, source)
