"""Creates side groups: process groups that include processes of other jobs, such as a trainer and inference engines."""

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
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.runtime.process_group import SIDE
from hpcinit.runtime.torch_store import serve
from hpcinit.world.network import family, in_url

LOOK_S = 0.1  # interval of checks for missing ranks
LINGER_S = 1.0  # rank 0 keeps the store open this long after a failure: several intervals of LOOK_S
NAMED = 8  # maximum number of ranks listed in a message
PEERS = ("hpcinit", "torch", "vllm")


def side_group(
    name: str,
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    backend: str,
    timeout: timedelta = timedelta(minutes=5),
    peers: str = "hpcinit",
) -> ProcessGroup:
    """Return a process group of `world_size` processes, which may belong to different jobs.

    The processes need no other process group, but each may have one. All must pass the same name, world_size and
    backend. Any process that can reach the port can join. Pass the group to torch.distributed's functions. Their rank
    arguments are ranks of this group. Destroy it with `torch.distributed.destroy_process_group(group)`, or together
    with the default group. It has no device_id.

    Args:
        name: name of the group, unique in this process.
        rank: this process's rank in the group, 0 to world_size - 1.
        world_size: number of processes.
        address: host name or IP address of the node of rank 0.
        port: a free port on that node, 1 to 65535.
        backend: torch's name of the backend, such as nccl or gloo.
        timeout: time limit for all processes to connect, and for each of the group's collectives.
        peers: which function the other processes call. hpcinit: this function. vllm: vLLM's
            `stateless_init_torch_distributed_process_group`, with the same address and port as here. torch:
            `_new_process_group_helper`, with `name` as the store prefix and as the group name. OpenRLHF, TRL and
            others do that. With vllm and torch, if a process is missing after `timeout`, the error does not name it.

    Raises RequestError if an argument is invalid. Raises BringUpError if some processes did not connect or passed
    different arguments. Its message names these processes.
    """
    own_name = f"{SIDE}{name}"
    label: Any = name if peers == "torch" else own_name  # newer versions of torch have the type GroupName for this
    _check(name, rank, world_size, port, peers, {label, own_name})
    deadline = time.monotonic() + timeout.total_seconds()
    where = f"side group {name!r} at {address}:{port}"
    prefix = {"hpcinit": f"hpcinit/side/{name}", "torch": name, "vllm": f"tcp://{in_url(address, port)}"}[peers]
    store = PrefixStore(prefix, _open(rank, address, port, world_size, deadline, where, counted=peers != "hpcinit"))
    store.set_timeout(timeout)
    if peers == "hpcinit":
        _gather(store, rank, world_size, backend, deadline, where)
    group: ProcessGroup
    try:
        with _no_split(), _unprefixed(store if peers == "vllm" else None):
            group, _ = c10d._new_process_group_helper(world_size, rank, [], backend, store, label, timeout=timeout)
    except RuntimeError as error:
        if peers == "hpcinit":  # all processes have connected, so none is missing
            raise
        reason = str(error).partition("\n")[0]
        raise BringUpError(
            f"{where}: could not form a group of {world_size} processes within {timeout.total_seconds():g} s: "
            f"{reason}. Do all other ranks use {peers} with this address, port and number of processes?",
            quoted=reason,
        ) from error
    names: Any = c10d._world.pg_names
    names[group] = own_name  # with this name, hpcinit's timeouts and reports skip the group
    c10d._world.pg_group_ranks[group] = {number: number for number in range(world_size)}
    return group


def _check(name: str, rank: int, world_size: int, port: int, peers: str, labels: set[str]) -> None:
    if peers not in PEERS:
        raise RequestError(f"side group {name!r}: peers is {peers!r}, expected {', '.join(PEERS[:-1])} or {PEERS[-1]}")
    if not 0 <= rank < world_size:
        raise RequestError(f"side group {name!r}: rank is {rank}, expected 0 to {world_size - 1}")
    if not 0 < port < 65_536:
        raise RequestError(f"side group {name!r}: port is {port}, expected 1 to 65535")
    if labels & set(c10d._world.pg_names.values()):
        raise RequestError(
            f"side group {name!r} already exists in this process: destroy it first, or choose another name"
        )


def _open(rank: int, address: str, port: int, world_size: int, deadline: float, where: str, counted: bool) -> Store:
    """Return the group's store, which rank 0 serves.

    torch's client waits forever if the server does not respond, so a thread opens the store.

    counted: whether this client is counted as connected. torch's rank 0 waits for all clients to be counted.
    """
    opened: list[Store] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            opened.append(
                _serve(address, port, world_size, deadline)
                if rank == 0
                else _reach(address, port, world_size, deadline, counted)
            )
        except (OSError, RuntimeError) as error:  # torch's DistError is a RuntimeError
            failed.append(error)

    thread = threading.Thread(target=work, name="hpcinit-side-group", daemon=True)
    thread.start()
    thread.join(_left(deadline) + 1)
    if opened:
        return opened[0]
    reason = str(failed[0]).partition("\n")[0] if failed else ""
    first = reason if failed else "a process listens there but does not respond"
    if rank == 0:
        raise BringUpError(
            f"{where}: rank 0 cannot listen there: {first}. Does the address belong to this node? Is the port free?",
            quoted=reason,
        )
    raise BringUpError(
        f"{where}: rank {rank} cannot connect to rank 0: {first}. Is rank 0 running with this address and port?",
        quoted=reason,
    )


def _serve(address: str, port: int, world_size: int, deadline: float) -> Store:
    # torch would listen on every interface; this socket listens only on this address.
    server = socket.create_server((address, port), family=family(_resolved(address)), backlog=128)
    return serve(address, server, world_size, timedelta(seconds=_left(deadline)))


def _reach(address: str, port: int, world_size: int, deadline: float, counted: bool) -> Store:
    left = timedelta(seconds=_left(deadline))
    return TCPStore(address, port, world_size, False, left, wait_for_workers=counted)


def _resolved(address: str) -> str:
    return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])


def _gather(store: Store, rank: int, world_size: int, backend: str, deadline: float, where: str) -> None:
    """Wait until all ranks have connected. If that fails, raise BringUpError on this rank and the others."""
    missing = list(range(world_size))
    try:
        _claim(store, rank, world_size, backend)
        while missing := [number for number in missing if not store.check([f"came/{number}"])]:
            if store.check(["failed"]):
                raise BringUpError(store.get("failed").decode(errors="replace"))
            if time.monotonic() > deadline:
                raise BringUpError(
                    f"{_named(missing)} of {world_size} did not connect in time; "
                    f"connected: {_here(store, missing, world_size)}"
                )
            time.sleep(LOOK_S)
    except BringUpError as error:
        store.set("failed", str(error))
        if rank == 0:
            time.sleep(LINGER_S)  # the store ends with rank 0, so let the other ranks read the error first
        raise BringUpError(f"{where}: {error}") from None
    except RuntimeError as error:  # rank 0 has closed the store (torch's DistError)
        raise BringUpError(
            f"{where}: rank 0 exited while rank {rank} waited for {_named(missing)} of {world_size}: read rank 0's log"
        ) from error


def _claim(store: Store, rank: int, world_size: int, backend: str) -> None:
    asked = json.dumps({"world_size": world_size, "backend": backend})
    found = store.compare_set("made", "", asked).decode(errors="replace")
    if found != asked:
        raise BringUpError(f"rank {rank} passed {asked}, but the first rank that connected passed {found}")
    me = f"{socket.gethostname()} (pid {os.getpid()})"
    first = store.compare_set(f"came/{rank}", "", me).decode(errors="replace")
    if first != me:
        raise BringUpError(f"two processes claim rank {rank}: {first}, which connected first, and {me}")


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
    """Hide from torch that the default group is bound to a device.

    Otherwise torch creates the new group by splitting the default group (ncclCommSplit), which waits for all ranks of
    the job and hangs (https://github.com/NVIDIA-NeMo/RL/pull/3189).
    """
    default = dist.group.WORLD if dist.is_initialized() else None
    bound = default.bound_device_id if default is not None else None
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


@contextlib.contextmanager
def _unprefixed(store: Store | None) -> Iterator[None]:
    """In this block, torch uses the keys of `store` without a prefix.

    torch usually puts the group's name and device in front of each key. vLLM does not, and a group with vLLM's ranks
    needs the same keys on both sides. Other stores are not affected.
    """
    if store is None:
        yield
        return
    torchs: Any = c10d
    prefixed = torchs.PrefixStore
    torchs.PrefixStore = lambda prefix, inner: inner if inner is store else prefixed(prefix, inner)
    try:
        yield
    finally:
        torchs.PrefixStore = prefixed
