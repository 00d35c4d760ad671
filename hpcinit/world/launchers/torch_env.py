"""Ranks whose torch variables the program has set (Ray), or a launcher without variables (DeepSpeed, Kubernetes).

Chosen if all of them are set and no other launcher is visible. Inside a Slurm step they may be stale, and
HPCINIT_STARTED_BY=env or init(started_by='env') confirms that they are valid.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcinit.base.errors import WorldError
from hpcinit.world import ENV_WORLD, World, number
from hpcinit.world.parent_step import UNKNOWN, Process

NAME = "env"
VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
}
DO = "with the launcher 'env' you must set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"


def present(env: Mapping[str, str]) -> bool:
    """Return True if the variables are complete and not inherited from a rank of hpcinit that started this process."""
    return many(env) and bool(env.get("LOCAL_RANK")) and ENV_WORLD not in env


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """Return the world from torch's five variables and LOCAL_WORLD_SIZE (without it: all ranks are on this node)."""
    address = env.get("MASTER_ADDR")
    if not address:
        raise WorldError(f"MASTER_ADDR is not set, expected rank 0's host: {DO}")
    rank, size = number(env, "RANK", DO), number(env, "WORLD_SIZE", DO)
    local_size = number(env, "LOCAL_WORLD_SIZE", DO) if "LOCAL_WORLD_SIZE" in env else size
    port = number(env, "MASTER_PORT", DO)
    return World(
        launcher=NAME,
        rank=rank,
        world_size=size,
        local_rank=number(env, "LOCAL_RANK", DO),
        local_world_size=local_size,
        node_rank=number(env, "GROUP_RANK", DO) if "GROUP_RANK" in env else rank // max(local_size, 1),
        hosts=(),
        master_addr=address,
        master_ports=(port,),
        job=f"{address}:{port}",
    )


def many(env: Mapping[str, str]) -> bool:
    """Return True if torch's variables are complete and describe more than one rank."""
    complete = all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return complete and env["WORLD_SIZE"] != "1"
