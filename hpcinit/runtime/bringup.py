"""init, shutdown and session: what training code uses."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpcinit.facts import hosts, launchers, runfolder
from hpcinit.facts.errors import BringUpError
from hpcinit.facts.layout import Layout
from hpcinit.facts.spec import Comm, Spec, of_this_run
from hpcinit.facts.world import World
from hpcinit.runtime import devices, mesh, rendezvous, seeds
from hpcinit.runtime.meeting.door import Door
from hpcinit.runtime.store import open_store
from hpcinit.runtime.watchdog import Watchdog, end_hard

PROGRESS_EVERY_S = 1.0
LATE_S = 15.0  # after the deadline of the start-up, for the errors that have names in them to come first


@dataclass(frozen=True)
class Runtime:
    """A rank whose process group is up.

    device: torch.device, already current. timeout: of the start-up; collective_timeout: of what follows.
    mesh: one dimension per kind of parallelism in use. folder: the run folder, None without a submission.
    """

    world: World
    device: torch.device
    backend: str
    timeout: timedelta
    collective_timeout: timedelta
    mesh: DeviceMesh
    seed: int
    folder: Path | None = None
    _last: dict[str, float] = field(default_factory=dict, repr=False)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.world_size

    @property
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def local_world_size(self) -> int:
        return self.world.local_world_size

    @property
    def node_rank(self) -> int:
        return self.world.node_rank

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.world.hosts

    def progress(self, step: int, total: int, **values: float) -> None:
        """Tell those who wait how far the training is: `run.progress(step, total, loss=1.2)`.

        Only rank 0 writes, at most once a second and always at the last step; elsewhere this does nothing.
        """
        now = time.monotonic()
        if self.rank or self.folder is None:
            return
        if step < total and now - self._last.get("progress", float("-inf")) < PROGRESS_EVERY_S:
            return
        self._last["progress"] = now
        document = {"step": step, "total": total, "values": values, "time": time.time()}
        temporary = self.folder / f"{runfolder.PROGRESS}.tmp"
        temporary.write_text(json.dumps(document) + "\n")
        temporary.replace(self.folder / runfolder.PROGRESS)


@dataclass(frozen=True)
class _Request:
    backend: str | None
    timeout: timedelta | None
    collective_timeout: timedelta | None
    seed: int | None
    layout: Layout | None
    deepspeed: bool | None
    launcher: str | None


_current: tuple[_Request, Runtime] | None = None


def init(
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    collective_timeout: timedelta | None = None,
    seed: int | None = None,
    layout: Layout | None = None,
    deepspeed: bool | None = None,
    launcher: str | None = None,
) -> Runtime:
    """Bring this rank's process group up and return its Runtime; every rank must call it.

    What is not given comes from the submission's config, and without one from the defaults: nccl on GPUs and
    gloo on CPUs, a start-up timeout that grows with the node count, collectives the same, seed 0, plain data
    parallelism, no DeepSpeed, the launcher that the environment shows.

    A second call with the same request returns the same object. Raises WorldError if the environment tells no
    consistent world, BringUpError if the group did not come up, or is up already and was asked for differently.
    """
    global _current  # noqa: PLW0603 - a process has one default process group, and so does this module
    request = _Request(backend, timeout, collective_timeout, seed, layout, deepspeed, launcher)
    if _current is not None:
        if _current[0] != request:
            raise BringUpError(f"init was called before as {_current[0]}, and now as {request}: call it once")
        return _current[1]
    if dist.is_initialized():
        raise BringUpError("a process group is up that hpcinit did not make: call hpcinit.init() instead of it")
    world = launchers.read(os.environ, launcher)
    if world.rank == 0:
        for warning in world.warnings:
            rendezvous.say(f"warning: {warning}")
    spec, folder = of_this_run(os.environ, world.world_size)
    try:
        _current = (request, _bring_up(request, world, spec, folder))
    except BaseException:
        _destroy()  # half a runtime would be in the way of a second try
        raise
    atexit.register(shutdown)
    return _current[1]


def _bring_up(request: _Request, world: World, spec: Spec | None, folder: Path | None) -> Runtime:
    began = time.monotonic()
    comm = spec.comm if spec else Comm()
    device = devices.choose(world)  # before the group exists: NCCL takes the current device
    backend = devices.backend(device, request.backend or comm.backend)
    timeout = request.timeout or comm.timeout.start_up(world.nodes)
    later = request.collective_timeout or _seconds(comm.collective_timeout_s) or timeout
    layout = (request.layout or (spec.layout if spec else Layout())).over(world.world_size)
    master = _make_group(world, spec, backend, timeout)
    if later != timeout:
        # torch takes one timeout for the start and for all that follows, unless told otherwise afterwards.
        dist.distributed_c10d._set_pg_timeout(later)
    if request.deepspeed if request.deepspeed is not None else comm.deepspeed:
        _deepspeed(backend, later)
    seed = request.seed if request.seed is not None else spec.seed if spec else 0
    seeds.seed_all(seed)
    if world.rank == 0:
        law = comm.timeout.formula(world.nodes) if request.timeout is None else f"{timeout.total_seconds():g} s"
        shape = f"{_count(world.world_size, 'rank')} on {_count(world.nodes, 'node')} ({world.launcher})"
        took_s = time.monotonic() - began
        rendezvous.say(
            f"{shape}, rank 0 at {master}, {backend} on {device}, up in {took_s:.1f} s; start-up timeout {law}"
        )
    return Runtime(world, device, backend, timeout, later, mesh.build(layout, device), seed, folder)


def _make_group(world: World, spec: Spec | None, backend: str, timeout: timedelta) -> str:
    """torch's default group, or an error that names who is missing. Returns where rank 0 was met."""
    deadline = time.monotonic() + timeout.total_seconds()
    meeting: rendezvous.Meeting | None = None

    def about() -> str:
        missing = (meeting.missing("up") if meeting else "") or "Rank 0 does not answer."
        return f"rank {world.rank} is not up after {timeout.total_seconds() + LATE_S:g} s. {missing}"

    with Watchdog(timeout.total_seconds() + LATE_S, about):
        try:
            meeting = rendezvous.meet(world, spec, timeout)
            os.environ.update(rendezvous.program_environment(world, meeting))
            if meeting:
                meeting.tell("imported")
            store = open_store(world, meeting, deadline)
            if meeting:
                # From here on this thread is inside torch and cannot look up: if a rank dies, end at once.
                meeting.on_failure(end_hard)
                meeting.tell("joined")
            # No device_id: it binds the group to eager NCCL, and groups made of some ranks only then hang in
            # ncclCommSplit (https://github.com/allenai/open-instruct/pull/1311).
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
            dist.barrier()
            if meeting:
                meeting.on_failure(None)
                meeting.tell("up")
        except BaseException as error:
            rendezvous.leave(str(error) or type(error).__name__)
            raise
    return hosts.in_url(world.master_addr, meeting.port if isinstance(meeting, Door) else world.master_ports[0])


def _deepspeed(backend: str, timeout: timedelta) -> None:
    """DeepSpeed on top of torch's group; it adopts what is there, and ignores in silence what it was asked."""
    try:
        import deepspeed  # noqa: PLC0415 - over a second to import
    except ImportError as error:
        raise BringUpError(f"comm.deepspeed is true, and DeepSpeed cannot be imported: {error}") from error
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout)
    if dist.get_backend() != backend:
        raise BringUpError(f"asked for backend {backend}, and with DeepSpeed on top it is {dist.get_backend()}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _seconds(number: float | None) -> timedelta | None:
    return None if number is None else timedelta(seconds=number)


def _after_fork() -> None:
    """In a forked child: the group is the parent's, and must not be destroyed from here."""
    global _current  # noqa: PLW0603
    _current = None
    atexit.unregister(shutdown)


os.register_at_fork(after_in_child=_after_fork)


def shutdown() -> None:
    """Take the process group down, DeepSpeed's module state too; init works again afterwards.

    Runs by itself at exit. Calling it twice, or without init, does nothing.
    """
    global _current  # noqa: PLW0603
    if _current is None:
        return
    _current = None
    atexit.unregister(shutdown)
    _destroy()


def _destroy() -> None:
    rendezvous.leave()
    if "deepspeed.comm.comm" in sys.modules:
        # Left set, a later init would talk to the dead group (DeepSpeed 0.19.8).
        sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def session(
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    collective_timeout: timedelta | None = None,
    seed: int | None = None,
    layout: Layout | None = None,
    deepspeed: bool | None = None,
    launcher: str | None = None,
) -> Iterator[Runtime]:
    """`with hpcinit.session() as run:` - init, and shutdown however the block ends."""
    runtime = init(
        backend=backend,
        timeout=timeout,
        collective_timeout=collective_timeout,
        seed=seed,
        layout=layout,
        deepspeed=deepspeed,
        launcher=launcher,
    )
    try:
        yield runtime
    finally:
        shutdown()
