"""Side groups: a second group, with processes outside the job (a trainer's rank 0 and its inference engines)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.rendezvous import protocol
from hpcinit.rendezvous.store import serve
from hpcinit.runtime.process_group import SIDE

LOOK_S = 0.1  # between two looks at who has come
LINGER_S = 1.0  # several looks
NAMED = 8  # so many missing ranks are named, and the others counted


def side_group(
    name: str,
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    backend: str,
    timeout: timedelta = timedelta(minutes=5),
) -> ProcessGroup:
    """A process group of `world_size` processes of any jobs, which need no other group and may each have one.

    rank: in this group; rank 0 is where address (a name or an IP of its node) and port (free there) are. timeout:
    until all have come, and of the group's collectives. All must give the same name, world_size and backend; whoever
    can reach the port can join. Pass the group to torch.distributed's functions, ranks counted in it; end it with
    `torch.distributed.destroy_process_group(group)`, or with the default group. It has no device_id.

    Raises RequestError for a request that cannot be, BringUpError that names who did not come or asked otherwise.
    """
    _check(name, rank, world_size, port)
    deadline = time.monotonic() + timeout.total_seconds()
    where = f"side group {name!r} at {address}:{port}"
    store = PrefixStore(f"hpcinit/side/{name}", _open(rank, address, port, world_size, deadline, where))
    store.set_timeout(timeout)
    _gather(store, rank, world_size, backend, deadline, where)
    with _no_split():
        group: ProcessGroup
        label: Any = f"{SIDE}{name}"  # newer torch types it as a GroupName, older has no such name
        group, _ = c10d._new_process_group_helper(world_size, rank, [], backend, store, label, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {number: number for number in range(world_size)}
    return group


def _check(name: str, rank: int, world_size: int, port: int) -> None:
    if not 0 <= rank < world_size:
        raise RequestError(f"side group {name!r}: rank is {rank}, expected 0 to {world_size - 1}")
    if not 0 < port < 65_536:
        raise RequestError(f"side group {name!r}: port is {port}, expected 1 to 65535, free on rank 0's node")
    if f"{SIDE}{name}" in c10d._world.pg_names.values():
        raise RequestError(f"side group {name!r} exists in this process: destroy it first, or choose another name")


def _open(rank: int, address: str, port: int, world_size: int, deadline: float, where: str) -> Store:
    """In a thread: torch's client has no deadline with a server that is silent."""
    opened: list[Store] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            opened.append(
                _serve(address, port, world_size, deadline)
                if rank == 0
                else _reach(address, port, world_size, deadline)
            )
        except (OSError, RuntimeError) as error:  # torch's DistError is a RuntimeError
            failed.append(error)

    thread = threading.Thread(target=work, name="hpcinit-side-group", daemon=True)
    thread.start()
    thread.join(_left(deadline) + 1)
    if opened:
        return opened[0]
    theirs = str(failed[0]).partition("\n")[0] if failed else ""
    first = theirs if failed else "somebody listens there who says nothing"
    if rank == 0:
        raise BringUpError(
            f"{where}: rank 0 cannot listen there: {first}; is it this node's address, and is it free?", quoted=theirs
        )
    raise BringUpError(
        f"{where}: rank {rank} did not find rank 0: {first}; was it started, does it listen there?", quoted=theirs
    )


def _serve(address: str, port: int, world_size: int, deadline: float) -> Store:
    # Bound here, so that it listens on this address and not on every interface.
    server = socket.create_server((address, port), family=protocol.family(_resolved(address)), backlog=128)
    return serve(address, server, world_size, timedelta(seconds=_left(deadline)))


def _reach(address: str, port: int, world_size: int, deadline: float) -> Store:
    left = timedelta(seconds=_left(deadline))
    return TCPStore(address, port, world_size, False, left, wait_for_workers=False)


def _resolved(address: str) -> str:
    return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])


def _gather(store: Store, rank: int, world_size: int, backend: str, deadline: float, where: str) -> None:
    """Until all have come. Raises BringUpError, and lets the others raise it."""
    missing = list(range(world_size))
    try:
        _claim(store, rank, world_size, backend)
        while missing := [number for number in missing if not store.check([f"came/{number}"])]:
            if store.check(["failed"]):
                raise BringUpError(store.get("failed").decode(errors="replace"))
            if time.monotonic() > deadline:
                raise BringUpError(
                    f"{_named(missing)} of {world_size} never came; here are {_here(store, missing, world_size)}"
                )
            time.sleep(LOOK_S)
    except BringUpError as error:
        store.set("failed", str(error))
        if rank == 0:
            time.sleep(LINGER_S)  # the store goes with rank 0: the others must have read it
        raise BringUpError(f"{where}: {error}") from None
    except RuntimeError as error:  # torch's DistError: the store is gone
        raise BringUpError(
            f"{where}: rank 0 ended while rank {rank} waited for {_named(missing)} of {world_size}: its log says why"
        ) from error


def _claim(store: Store, rank: int, world_size: int, backend: str) -> None:
    asked = json.dumps({"world_size": world_size, "backend": backend})
    found = store.compare_set("made", "", asked).decode(errors="replace")
    if found != asked:
        raise BringUpError(f"rank {rank} asks for {asked}, and who came first for {found}")
    me = f"{socket.gethostname()} (pid {os.getpid()})"
    first = store.compare_set(f"came/{rank}", "", me).decode(errors="replace")
    if first != me:
        raise BringUpError(f"two processes claim rank {rank}: {first}, which came first, and {me}")


def _named(missing: Sequence[int]) -> str:
    listed = ", ".join(map(str, missing[:NAMED])) + (f" and {len(missing) - NAMED} more" * (len(missing) > NAMED))
    return f"rank{'s' * (len(missing) > 1)} {listed}"


def _here(store: Store, missing: Sequence[int], world_size: int) -> str:
    here = [number for number in range(world_size) if number not in set(missing)]
    hosts = {number: store.get(f"came/{number}").decode(errors="replace") for number in here[:NAMED]}
    return ", ".join(f"rank {number} on {host}" for number, host in hosts.items())


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


@contextlib.contextmanager
def _no_split() -> Iterator[None]:
    """Hide that the default group is bound to a device, while torch looks.

    It would make the new group by splitting that one (ncclCommSplit), for which all ranks of the job must come, and
    hang (https://github.com/NVIDIA-NeMo/RL/pull/3189).
    """
    default = c10d._get_default_group() if dist.is_initialized() else None
    bound = default.bound_device_id if default is not None else None
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
