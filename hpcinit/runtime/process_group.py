"""Creates torch's default process group after the rendezvous, changes its timeout, and checks its settings."""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d

from hpcinit.base.errors import BringUpError
from hpcinit.base.processes import end_hard, watchdog
from hpcinit.records.spec import Spec
from hpcinit.rendezvous.rendezvous_client import RendezvousEndpoint
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.runtime import startup
from hpcinit.runtime.torch_store import open_store
from hpcinit.world import World, network
from hpcinit.world.launchers.mpi import check_horovod, horovod

LATE_S = 15.0  # how long the watchdog waits after the deadline, so that errors with rank names appear first
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIDE = "hpcinit-side/"  # prefix of the names of side groups


def make(
    world: World,
    spec: Spec | None,
    backend: str,
    timeout: timedelta,
    device: torch.device,
    device_id: torch.device | None,
    recorded: Mapping[str, object],
) -> str:
    """Create torch's default process group, and return rank 0's address.

    If ranks are missing, raise a BringUpError that names them.

    device: this rank's device.
    device_id: the device to which the group is bound, or None.
    recorded: additional fields for the start-up timeline.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    rendezvous: RendezvousEndpoint | None = None

    def about() -> str:
        missing = (rendezvous.missing("up") if rendezvous else "") or "Rank 0 does not respond."
        return f"rank {world.rank} is not initialized after {timeout.total_seconds() + LATE_S:g} s. {missing}"

    with watchdog(timeout.total_seconds() + LATE_S, about):
        try:
            rendezvous = startup.join_rendezvous(world, spec, timeout)
            os.environ.update(startup.program_environment(world, rendezvous))
            startup.reach("device", **recorded)
            store = open_store(world, rendezvous, deadline)
            if rendezvous:
                # From here on, torch blocks this thread, so make another thread end the process if a rank dies.
                rendezvous.on_failure(end_hard)
            startup.reach("store")
            _in_torch(world, store, backend, timeout, device, device_id)
            if rendezvous:
                rendezvous.on_failure(None)
            startup.reach("collective")
        except BaseException as error:
            startup.leave_rendezvous(str(error) or type(error).__name__)
            raise
    return network.in_url(
        world.master_addr, rendezvous.port if isinstance(rendezvous, RendezvousServer) else world.master_ports[0]
    )


def _in_torch(
    world: World,
    store: Store,
    backend: str,
    timeout: timedelta,
    device: torch.device,
    device_id: torch.device | None,
) -> None:
    """Create the group and wait until every rank has joined. Raise BringUpError with a summary of torch's error."""
    try:
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout, device_id=device_id
        )
        startup.reach("joined")
        barrier(device)
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors are RuntimeErrors
        gist, there = _gist(error), ", ".join(name for _, name in socket.if_nameindex())
        asked = [f"{name}={os.environ[name]}" for name in INTERFACES if name in os.environ]
        wanted = f"; check {' and '.join(asked)} (cluster.interface): this node has {there}" if asked else ""
        raise BringUpError(
            f"torch could not create the process group ({backend}) on rank {world.rank}, {socket.gethostname()}: "
            f"{gist}{wanted}; for more output, set TORCH_CPP_LOG_LEVEL=INFO (torch) or NCCL_DEBUG=INFO (NCCL)",
            quoted=gist,
        ) from error


def barrier(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Wait until every rank of the group has called this.

    This passes device_ids, because torch's first barrier without them can hang: NCCL then uses the GPU whose index is
    the global rank modulo the number of visible GPUs, which may not be this rank's GPU.

    device: this rank's device.
    group: the process group, or None for the default group.
    """
    dist.barrier(group=group, device_ids=None if device.type == "cpu" else [device.index])


def _gist(error: Exception) -> str:
    """Return the first line of the error, and NCCL's reason if the error ends with one ('Last error: ...')."""
    text = str(error).strip()
    first = text.partition("\n")[0] or type(error).__name__
    reason = " ".join(text.partition("Last error:")[2].split())
    return f"{first} ({reason})" if reason else first


def set_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> bool:
    """Set the timeout of collectives for every process group of this process.

    Return False if a backend cannot change it.

    Groups that are created later get torch's default again (10 minutes with NCCL, 30 with gloo). Side groups are not
    changed.

    group: change only this group, or None for all.
    """
    backends = list(_backends_of_all() if group is None else _backends(group))
    done = bool(backends)
    for backend in backends:
        try:
            _change(backend, timeout)
        except (RuntimeError, NotImplementedError):  # only gloo and NCCL can change it
            done = False
    return done


@contextmanager
def timeouts_of_at_least(timeout: timedelta) -> Iterator[None]:
    """While this block runs, give every group a timeout of at least `timeout`. Side groups are not changed.

    If torch cannot read or change the timeout of a backend, that timeout stays the same.
    """
    before = [(backend, _timeout_given_to(backend)) for backend in _backends_of_all()]
    shorter = [(backend, found) for backend, found in before if found is not None and found < timeout]
    for backend, _ in shorter:
        with suppress(RuntimeError, NotImplementedError):
            _change(backend, timeout)
    try:
        yield
    finally:
        for backend, found in shorter:
            with suppress(RuntimeError, NotImplementedError):
                _change(backend, found)


def _change(backend: object, timeout: timedelta) -> None:
    change = getattr(backend, "_set_default_timeout", None) or getattr(backend, "set_timeout", None)
    if change is None:
        raise NotImplementedError
    change(timeout)


def timeout_of(device: torch.device, group: ProcessGroup | None = None) -> timedelta | None:
    """Return the timeout of the group's collectives on `device`, or None if the backend does not report it."""
    asked: Any = group or dist.group.WORLD
    try:
        return _timeout_given_to(_unwrapped(asked._get_backend(device)))
    except AttributeError:  # a later torch may lack it, see private_names.py
        return None


def _timeout_given_to(backend: object) -> timedelta | None:
    found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def backend_on(device_type: str) -> str:
    """Return the name of the default group's backend for tensors on 'cpu' or 'cuda', or '' if it has none."""
    # "cpu:gloo,cuda:nccl"; get_backend() returns "undefined" for a group created without a backend name.
    by_device = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
    return by_device.get(device_type, "")


def bound_to() -> torch.device | None:
    """Return the device to which the default group is bound (its device_id), or None."""
    return dist.group.WORLD.bound_device_id if dist.group.WORLD else None


def verify(
    device: torch.device, backends: Mapping[str, str], timeout: timedelta | None, device_id: torch.device | None
) -> None:
    """Check that the process group has the requested settings. If not, raise a BringUpError that lists all differences.

    This check is needed because DeepSpeed silently ignores the requested backend, timeout and device if a group exists.

    timeout: the timeout of collectives, or None to skip this check.
    """
    current = device
    if device.type != "cpu":
        current = torch.device(device.type, torch.accelerator.current_device_index())
    found_timeout = timeout_of(device) if timeout else None
    differences = [
        f"{name} is {found}, expected {asked}"
        for name, asked, found in (
            *(("backend", name, backend_on(kind)) for kind, name in backends.items()),
            ("the collective timeout", timeout, timeout if found_timeout is None else found_timeout),
            ("device", device, current),
            ("device_id", device_id, bound_to()),
        )
        if asked != found
    ]
    if differences:
        raise BringUpError(f"the process group does not have the requested settings: {'; '.join(differences)}")


def _backends_of_all() -> Iterator[object]:
    """Yield the backends of all groups of this process. Omit side groups, which include processes of other jobs."""
    try:
        names = list(c10d._world.pg_names.items())
    except AttributeError:  # a later torch may lack it, see private_names.py
        return
    for group, name in names:
        if not str(name).startswith(SIDE):
            yield from _backends(group)


def _backends(group: ProcessGroup) -> Iterator[object]:
    with suppress(AttributeError):  # a later torch may lack one of these, see private_names.py
        for device in group._device_types:
            yield _unwrapped(group._get_backend(device))


def _unwrapped(backend: object) -> object:
    """Return the backend inside the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL adds to compare the ranks' calls."""
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend


def start_horovod(world: World) -> None:
    """If horovodrun started this process, call hvd.init(), unless the program has already called it.

    Call this function after all ranks have connected: hvd.init() waits for every rank and does not report which one is
    missing. If Horovod was built without torch, do nothing. Raise WorldError if Horovod reports a different rank or
    size.
    """
    if world.launcher != horovod.NAME:
        return
    try:
        hvd = importlib.import_module("horovod.torch")
    except ImportError:
        return
    if not hvd.is_initialized():
        hvd.init()
    check_horovod(world)
