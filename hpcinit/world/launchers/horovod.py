"""Ranks started by horovodrun with its own (Gloo) launcher; with MPI underneath, Open MPI started them.

Variables: horovod/runner/gloo_run.py, create_slot_env_vars and create_run_env_vars (0.28.1).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hpcinit.base.errors import WorldError
from hpcinit.world import World, number
from hpcinit.world.launchers import rank0_address
from hpcinit.world.parent_step import UNKNOWN, Process

NAME = "horovod"
VARIABLES = {
    "rank": "HOROVOD_RANK",
    "world_size": "HOROVOD_SIZE",
    "local_rank": "HOROVOD_LOCAL_RANK",
    "local_world_size": "HOROVOD_LOCAL_SIZE",
}
DO = "horovodrun sets it for every rank; start the ranks with horovodrun"
LOST = (
    "horovodrun started {size} ranks, {here} of them on this node, but HOROVOD_GLOO_RENDEZVOUS_ADDR is not set: set "
    "MASTER_ADDR to rank 0's host for all of them"
)


def present(env: Mapping[str, str]) -> bool:
    return "HOROVOD_RANK" in env


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """Return the world from Horovod's variables; rank 0's host is certain on one node, or if MASTER_ADDR is set.

    Raise WorldError if a value is absent, or if there is no address for the rendezvous.
    """
    driver = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")  # the host of horovodrun, which may not be rank 0's host
    port = env.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    # CROSS_SIZE is the number of nodes that have this local rank: only for local rank 0 it is all nodes.
    counts = env.get("HOROVOD_LOCAL_RANK") == "0" and "HOROVOD_CROSS_SIZE" in env
    source = rank0_address.Rank0Address(
        NAME,
        job=f"{driver}:{port}" if driver and port else "",
        own=env.get("HOROVOD_HOSTNAME", ""),
        guess=driver,
        lost=LOST,
        # The index among the ranks with this local rank: the node's number if all nodes have the same number of ranks.
        node_rank="HOROVOD_CROSS_RANK",
        node_count=number(env, "HOROVOD_CROSS_SIZE", DO) if counts else 0,
    )
    return rank0_address.world_of(env, VARIABLES, DO, source)


def check(world: World) -> None:
    """Compare with Horovod itself, if this process has already initialized it. Never import it.

    Raise WorldError if Horovod has another rank or size.
    """
    hvd = sys.modules.get("horovod.torch")
    if hvd is None or not hvd.is_initialized():
        return
    if (hvd.rank(), hvd.size()) != (world.rank, world.world_size):
        raise WorldError(
            f"Horovod is initialized as rank {hvd.rank()} of {hvd.size()}, and {world.launcher} started this process "
            f"as rank {world.rank} of {world.world_size}: start the ranks with one of them only"
        )
