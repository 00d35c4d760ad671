"""Opens torch's store after the rendezvous. Rank 0 binds a port before it sends the port's number to the others."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from hpcinit.base.errors import BringUpError
from hpcinit.rendezvous.join import report_interval_s
from hpcinit.rendezvous.rendezvous_client import RendezvousEndpoint, spread_s
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.runtime.process_state import state
from hpcinit.world import World, exports


def open_store(world: World, rendezvous: RendezvousEndpoint | None, deadline: float) -> Store:
    """Return the store that all ranks of this attempt share.

    A rank cannot connect to another program's store by mistake. If ranks are missing, raise a BringUpError that names
    them.

    deadline: when to give up, in seconds of time.monotonic().
    """
    if world.world_size == 1:
        return HashStore()
    if rendezvous is None:
        return _store_of_torchrun(world, _time_left(deadline))
    every_s = report_interval_s(world)
    if isinstance(rendezvous, RendezvousServer):
        server = rendezvous.listen_for_store()
        rendezvous.offer_store(server.getsockname()[1])
        port = rendezvous.wait_for_store(deadline, every_s)
        store = serve(rendezvous.address, server, world.world_size, _time_left(deadline))
    else:
        port = rendezvous.wait_for_store(deadline, every_s)
        time.sleep(spread_s(world.world_size))
        store = TCPStore(
            rendezvous.address, port, world.world_size, False, _time_left(deadline), wait_for_workers=False
        )
    return PrefixStore(f"hpcinit/{world.job}", store)


def serve(address: str, listener: socket.socket, world_size: int, timeout: timedelta) -> TCPStore:
    """Return torch's store, which listens on `listener`. torch closes this socket at the end.

    address: the address to which the socket is bound.
    """
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _store_of_torchrun(world: World, timeout: timedelta) -> Store:
    state.agent_store_rounds += 1  # after a shutdown(), the agent's store still has the old keys
    os.environ.update(exports(world))
    try:
        store: Store = next(rendezvous("env://", world.rank, world.world_size, timeout=timeout))[0]
    except (DistError, OSError) as error:
        where = f"{world.master_addr}:{world.master_ports[0]}"
        first = str(error).partition("\n")[0]
        raise BringUpError(
            f"rank {world.rank} could not connect to torchrun's store at {where}: {first}. Has torchrun on the first "
            "node failed? Its messages are in the job's log",
            quoted=first,
        ) from error
    return PrefixStore(f"hpcinit/{world.job}/{state.agent_store_rounds}", store)


def _time_left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))
