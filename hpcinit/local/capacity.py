"""Can this machine hold so many ranks?"""

from __future__ import annotations

from collections.abc import Iterator

import psutil

MOST_NODES = 254  # node i is 127.0.0.i
MOST_RANKS_PER_CORE = 32


def problem(nodes: int, world_size: int, mem_gb_per_rank: float) -> Iterator[str]:
    """A message for each way in which the request is too large for this machine."""
    if nodes > MOST_NODES:
        yield f"nodes={nodes}, but cluster=local has at most {MOST_NODES}: the addresses 127.0.0.1 to 127.0.0.254"
    free_gb = psutil.virtual_memory().available / 1e9
    if world_size * mem_gb_per_rank > free_gb:
        yield (
            f"{world_size} ranks x {mem_gb_per_rank:g} GB (cluster.mem_gb_per_rank) = "
            f"{world_size * mem_gb_per_rank:g} GB, but this machine has {free_gb:.1f} GB free: at most "
            f"{int(free_gb / mem_gb_per_rank)} ranks fit"
        )
    cores = psutil.cpu_count() or 1
    if world_size > MOST_RANKS_PER_CORE * cores:
        yield (
            f"{world_size} ranks on {cores} cores: at most {MOST_RANKS_PER_CORE} ranks per core, "
            f"{MOST_RANKS_PER_CORE * cores} in all, come up in reasonable time"
        )
