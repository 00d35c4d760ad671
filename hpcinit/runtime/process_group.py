"""torch's default group: made with the ranks that have met, with a timeout for later, and read back."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hpcinit.base.errors import BringUpError
from hpcinit.records.spec import Spec
from hpcinit.rendezvous import join, startup_events
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.rendezvous.store import open_store
from hpcinit.rendezvous.watchdog import Watchdog, end_hard
from hpcinit.world import World, hosts, network

LATE_S = 15.0  # after the deadline of the start-up, for the errors that have names in them to come first
SIDE = "hpcinit-side/"  # what names of side groups begin with


def make(
    world: World,
    spec: Spec | None,
    backend: str,
    timeout: timedelta,
    device: torch.device,
    device_id: torch.device | None,
) -> str:
    """torch's default group, or an error that names who is missing. Returns where rank 0 was met.

    device: this rank's. device_id: what the group is bound to, None for nothing.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    rendezvous: join.Rendezvous | None = None

    def about() -> str:
        missing = (rendezvous.missing("up") if rendezvous else "") or "Rank 0 does not answer."
        return f"rank {world.rank} is not up after {timeout.total_seconds() + LATE_S:g} s. {missing}"

    with Watchdog(timeout.total_seconds() + LATE_S, about):
        try:
            rendezvous = join.join_rendezvous(world, spec, timeout)
            os.environ.update(join.program_environment(world, rendezvous))
            refuse_interfaces(os.environ, backend)  # once all can hear of it
            if rendezvous:
                rendezvous.report_phase("imported")
            store = open_store(world, rendezvous, deadline)
            startup_events.record_event("store")
            if rendezvous:
                # From here on this thread is inside torch and cannot look up: if a rank dies, end at once.
                rendezvous.on_failure(end_hard)
                rendezvous.report_phase("joined")
            _in_torch(world, store, backend, timeout, device, device_id)
            if rendezvous:
                rendezvous.on_failure(None)
                rendezvous.report_phase("up")
        except BaseException as error:
            join.leave_rendezvous(str(error) or type(error).__name__)
            raise
    return hosts.in_url(
        world.master_addr, rendezvous.port if isinstance(rendezvous, RendezvousServer) else world.master_ports[0]
    )


def refuse_interfaces(env: Mapping[str, str], backend: str) -> None:
    """Raises BringUpError if a variable names interfaces for `backend` that this node does not have."""
    there = network.interface_names()
    for variable, (reader, unmatched) in network.READS.items():
        missing = unmatched(env.get(variable, ""), there) if reader in backend else []
        if missing:
            raise BringUpError(
                f"{variable} is {env[variable]} (the config's cluster.interface sets it), and {', '.join(missing)} "
                f"fits no interface of {socket.gethostname()}: it has {', '.join(there)}; name one that every node "
                "has, or none (cluster.interface=null), for gloo and NCCL to choose by themselves"
            )


def _in_torch(
    world: World,
    store: Store,
    backend: str,
    timeout: timedelta,
    device: torch.device,
    device_id: torch.device | None,
) -> None:
    """The group, and that all are in it. Raises BringUpError with the gist of torch's own error."""
    try:
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout, device_id=device_id
        )
        startup_events.record_event("joined")
        barrier(device)
        startup_events.record_event("collective")
    except (RuntimeError, ValueError, OSError) as error:  # torch's own are RuntimeErrors
        gist = _gist(error)
        raise BringUpError(
            f"torch did not make the process group ({backend}) on rank {world.rank}, {socket.gethostname()}: "
            f"{gist}; TORCH_CPP_LOG_LEVEL=INFO has torch say more, and NCCL_DEBUG=INFO has NCCL",
            quoted=gist,
        ) from error


def barrier(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Wait until every rank of `group` (None: the default group) has called this. device: this rank's.

    Without device_ids, ProcessGroupNCCL::barrier of a group that has no device yet takes the global rank modulo the
    number of visible devices. With 2 ranks on each of two nodes of 8 GPUs, rank 2 would use GPU 2 for its first barrier
    and GPU 0 for all that follows, which then hangs.
    """
    dist.barrier(group=group, device_ids=None if device.type == "cpu" else [device.index])


def _gist(error: Exception) -> str:
    """The first line, and where NCCL says so the reason, which stands at the end: 'Last error:\\nsocketStart...'."""
    text = str(error).strip()
    first = text.partition("\n")[0] or type(error).__name__
    reason = " ".join(text.partition("Last error:")[2].split())
    return f"{first} ({reason})" if reason else first


def set_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> bool:
    """Of the collectives of all groups that this process is in, side groups left out; False if a backend cannot.

    group: only of this one.

    torch takes one timeout for a group's start and for all that follows, unless told otherwise afterwards; groups that
    are made later, a mesh's too, have torch's own (10 minutes with NCCL, 30 with gloo) whatever the first was given.
    """
    done = True
    for backend in _backends_of_all() if group is None else _backends(group):
        try:
            _change(backend, timeout)
        except (RuntimeError, NotImplementedError):  # of torch's own, gloo and NCCL can
            done = False
    return done


@contextmanager
def timeouts_of_at_least(timeout: timedelta) -> Iterator[None]:
    """Raise the shorter timeouts of all groups but side groups to `timeout`, and restore each of them at the end.

    A backend that cannot report or change its timeout keeps it.
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
    """What the group's collectives on `device` are given; None where its backend does not say."""
    return _timeout_given_to(_unwrapped((group or c10d._get_default_group())._get_backend(device)))


def _timeout_given_to(backend: object) -> timedelta | None:
    found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def backend_on(device: torch.device) -> str:
    """The name of the default group's backend for tensors on `device`, '' if it has none."""
    # "cpu:gloo,cuda:nccl"; get_backend() says "undefined" where a group was made without naming one.
    by_device = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
    return by_device.get(device.type, "")


def bound_to() -> torch.device | None:
    """The device_id that the default group was given, None for none."""
    found: torch.device | None = c10d._get_default_group().bound_device_id
    return found


def verify(device: torch.device, backend: str, timeout: timedelta | None, device_id: torch.device | None) -> None:
    """Read back what the group and the process have now. Raises BringUpError with both values of what differs.

    timeout: of collectives, None where it is not looked at. DeepSpeed takes a backend, a timeout and a device, and
    drops them in silence if a group is there.
    """
    current = device
    if device.type != "cpu":
        current = torch.device(device.type, torch.accelerator.current_device_index())
    found_timeout = timeout_of(device) if timeout else None
    differences = [
        f"asked for {name} {asked}, and it is {found}"
        for name, asked, found in (
            ("backend", backend, backend_on(device)),
            ("a collective timeout of", timeout, timeout if found_timeout is None else found_timeout),
            ("device", device, current),
            ("device_id", device_id, bound_to()),
        )
        if asked != found
    ]
    if differences:
        raise BringUpError(f"the process group is up, and not as asked: {'; '.join(differences)}")


def _backends_of_all() -> Iterator[object]:
    """Of all groups that this process is in, but side groups, which other jobs share."""
    for group, name in list(c10d._world.pg_names.items()):
        if not str(name).startswith(SIDE):
            yield from _backends(group)


def _backends(group: ProcessGroup) -> Iterator[object]:
    for device in group._device_types:
        yield _unwrapped(group._get_backend(device))


def _unwrapped(backend: object) -> object:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps a backend in one that compares the ranks' calls."""
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend
