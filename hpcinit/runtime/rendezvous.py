"""Where the ranks meet: the store behind the process group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from hpcinit.facts.errors import BringUpError
from hpcinit.facts.world import World, exports


def open_store(world: World, nonce: str, timeout: timedelta) -> Store:
    """A store that all ranks of this start share, and no other start of the same job.

    A rank left over from before a requeue keeps trying the same address; behind the nonce and the job's
    identity (which counts restarts) it can wait for ever, but never join. Sets MASTER_ADDR, RANK and the others.
    Raises BringUpError.
    """
    os.environ.update(exports(world))
    if world.world_size == 1:
        return HashStore()
    try:
        # env:// and not a TCPStore of our own: under torchrun the agent holds the store already.
        store, _, _ = next(rendezvous("env://", world.rank, world.world_size, timeout=timeout))
    except (DistError, OSError) as error:
        raise BringUpError(_why(world, timeout, error)) from error
    return PrefixStore(f"hpcinit/{nonce}/{world.job}", store)


def _why(world: World, timeout: timedelta, error: Exception) -> str:
    where = f"{world.master_addr}:{world.master_ports[0]}"
    me = f"rank {world.rank} on {world.host or socket.gethostname()}"
    first = str(error).partition("\n")[0]
    if world.rank == 0:
        return f"{me} could not listen at {where}: {first}; is another program on that port?"
    return (
        f"{me} could not reach rank 0 at {where} within {timeout.total_seconds():g} s: {first}; did rank 0 start, "
        f"does {world.master_addr} resolve on this node, does a firewall stand between?"
    )
