"""Ranks started by horovodrun with its own (Gloo) launcher; with MPI underneath they are Open MPI's.

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
    "horovodrun started {size} ranks, {here} of them on this node, and HOROVOD_GLOO_RENDEZVOUS_ADDR is not set: give "
    "rank 0's host to all of them (MASTER_ADDR)"
)


def present(env: Mapping[str, str]) -> bool:
    return "HOROVOD_RANK" in env


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """Every value from Horovod's variables; the master is known on one node, or where MASTER_ADDR was given.

    Raises WorldError if a value is absent, or if nothing tells where to meet.
    """
    driver = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")  # where horovodrun runs, which need not be rank 0's host
    port = env.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    # CROSS_SIZE counts the nodes that have this local rank: all of them only for local rank 0.
    counts = env.get("HOROVOD_LOCAL_RANK") == "0" and "HOROVOD_CROSS_SIZE" in env
    told = rank0_address.Rank0Address(
        NAME,
        job=f"{driver}:{port}" if driver and port else "",
        own=env.get("HOROVOD_HOSTNAME", ""),
        guess=driver,
        lost=LOST,
        # Among the ranks with this local rank, which is the node's number where all nodes have as many ranks.
        node_rank="HOROVOD_CROSS_RANK",
        node_count=number(env, "HOROVOD_CROSS_SIZE", DO) if counts else 0,
    )
    return rank0_address.world_of(env, VARIABLES, DO, told)


def check(world: World) -> None:
    """Against Horovod itself, if this process has initialised it already. Never imports it.

    Raises WorldError if Horovod has another rank or size.
    """
    hvd = sys.modules.get("horovod.torch")
    if hvd is None or not hvd.is_initialized():
        return
    if (hvd.rank(), hvd.size()) != (world.rank, world.world_size):
        raise WorldError(
            f"Horovod is initialised as rank {hvd.rank()} of {hvd.size()}, and {world.launcher} started this process "
            f"as rank {world.rank} of {world.world_size}: start the ranks with one of them only"
        )
