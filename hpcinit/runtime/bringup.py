"""init, shutdown and session, which training code uses, and how the process groups are destroyed."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hpcinit.base import process_limits
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError
from hpcinit.records import safeguards
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Samples, Spec, Training, of_this_run
from hpcinit.records.startup_timeout import check_clock
from hpcinit.rendezvous import join, startup_events
from hpcinit.rendezvous.process_state import state
from hpcinit.rendezvous.watchdog import end_hard
from hpcinit.runtime import affinity, deepspeed_setup, devices, init_request, mesh, process_group, program, seeds
from hpcinit.runtime.init_request import Plan, Request, resolve
from hpcinit.runtime.lifecycle import loader_workers
from hpcinit.runtime.runtime import Runtime, Session
from hpcinit.world import World, launchers

# Taking the group down: in a bounded time, whatever its peers do.


def destroy_process_groups(timeout: timedelta, device: torch.device | None = None) -> None:
    """torch's groups, all of them. If that takes longer than `timeout`, say so and go on without it.

    The process is then no use for another group, and ends hard where the interpreter would: its last steps wait for
    threads that are inside the group (https://github.com/pytorch/pytorch/issues/119250).
    """
    if state.stuck_group or not dist.is_initialized():
        return
    raised: list[BaseException] = []
    thread = threading.Thread(target=_destroy_groups, args=(device, raised), name="hpcinit-shutdown", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        state.stuck_group = (
            f"the process group did not go down in {timeout.total_seconds():g} s: a peer that died or hangs holds it "
            "up; look for the rank that failed first"
        )
        say(f"warning: {state.stuck_group}. This process goes on without it, and will end with exit status 1")
    elif raised:
        raise raised[0]


def refuse_if_stuck() -> None:
    """Raises BringUpError if a group of this process never went down."""
    if state.stuck_group:
        raise BringUpError(f"no second process group in this process: {state.stuck_group}")


def _destroy_groups(device: torch.device | None, raised: list[BaseException]) -> None:
    try:
        if device is not None and device.type != "cpu":
            torch.accelerator.set_device_index(device.index)  # each thread has its own
        dist.destroy_process_group()
    except BaseException as error:
        raised.append(error)


@atexit.register
def _end_if_stuck() -> None:
    # Registered when this module is imported, so that it runs after what the program registered later.
    if state.stuck_group:
        end_hard(state.stuck_group)


# A group whose peers are alive goes down in well under a second; Slurm itself waits 30 s (KillWait) before it kills.
SHUTDOWN = timedelta(seconds=30)


def init(
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    collective_timeout: timedelta | None = None,
    device_id: str | None = None,
    deepspeed: bool | None = None,
    layout: Layout | None = None,
    batch: Samples | None = None,
    training: Training | None = None,
    seed: int | None = None,
    seed_by: str | None = None,
    deterministic: bool | None = None,
    launcher: str | None = None,
) -> Runtime:
    """Bring this rank's process group up and return its Runtime; every rank must call it.

    What is not given comes from the submission's config, and without one from the defaults: nccl on GPUs and gloo on
    CPUs; a start-up timeout that grows with the node count and ends before the job does; 300 s for collectives; no
    device_id ('never', 'auto' or 'always'); no DeepSpeed; plain data parallelism with micro batches of 1; DDP in
    run.wrap; seed 0, by 'same' ('rank', 'data'); algorithms as torch chooses them; the launcher that the environment
    shows.

    A second call with the same request returns the same object. A group that is up already and was made by somebody
    else is taken if it matches. Raises WorldError if the environment tells no consistent world, BringUpError if the
    group did not come up, or is up already and was asked for differently.
    """
    request = Request(
        backend=backend,
        timeout=timeout,
        collective_timeout=collective_timeout,
        device_id=device_id,
        deepspeed=deepspeed,
        layout=layout,
        batch=batch,
        training=training,
        seed=seed,
        seed_by=seed_by,
        deterministic=deterministic,
        launcher=launcher,
    )
    if state.runtime is not None:
        if different := state.runtime._session.request.differences(request):
            raise BringUpError(f"init was called before with another request: {different}; call it once, or shutdown()")
        return state.runtime
    refuse_if_stuck()
    return _first_init(request)


def _first_init(request: Request) -> Runtime:
    world = launchers.read(os.environ, request.launcher)
    if world.rank == 0:
        for warning in world.warnings:
            say(f"warning: {warning}")
    spec, folder = of_this_run(os.environ, world.world_size)
    theirs = dist.is_initialized()
    try:
        runtime = state.runtime = _bring_up(request, world, spec, folder)
    except BaseException:
        if not theirs:  # half a runtime would be in the way of a second try
            if (
                dist.is_initialized()
            ):  # else the rendezvous is still to come, and a rank that is late must find this one
                join.leave_rendezvous()
            _destroy(None, deepspeed_started=True, timeout=SHUTDOWN)
        raise
    atexit.register(shutdown)
    return runtime


def _bring_up(request: Request, world: World, spec: Spec | None, folder: Path | None) -> Runtime:
    began = time.monotonic()
    startup_events.begin_startup(world, folder)
    startup_events.record_event("imported")
    process_limits.raise_open_files_limit(world.world_size)
    protected = safeguards.apply(os.environ, folder, world.job)
    if doubt := check_clock(os.environ, time.time()):
        say(doubt)
    device = devices.choose(world)  # before the group exists: NCCL takes the current device
    plan = resolve(request, world, spec, device)
    notes = [affinity.bind(world, device), plan.binding.why]
    if plan.deterministic:
        notes.extend(seeds.make_deterministic(os.environ))
    asked = {"timeout_s": plan.timeout.total_seconds(), "formula": plan.formula} if world.rank == 0 else {}
    startup_events.record_event("device", **asked)
    kept, where = _group(world, spec, plan)
    above = plan.deepspeed and deepspeed_setup.start_deepspeed(plan.backend, plan.collective_timeout, device)
    made = mesh.build_mesh(plan.layout, device)
    collectives = _settle(plan, keep=kept is not None and request.collective_timeout is None)
    loader_workers.install(plan.stopping.numbers)
    seeds.seed_all(seeds.of(plan.seed, plan.seed_by, world.rank, plan.layout.data_rank(world.rank)))
    startup_events.record_event("up")
    if world.rank == 0:
        took_s = time.monotonic() - began
        _report(world, plan, f"{where}, {plan.backend} on {device}, up in {took_s:.1f} s", collectives, notes)
        table = f"layout\n{mesh.rank_table(plan.layout)}" if mesh.rank_table(plan.layout) else ""
        for line in (table, devices.unseen(device), safeguards.describe(os.environ, protected)):
            if line:
                say(line)
    return Runtime(world, plan, made, folder, Session(request, kept, above, collectives))


def _group(world: World, spec: Spec | None, plan: Plan) -> tuple[frozenset[ProcessGroup] | None, str]:
    """The default group, ours or the one that is there; and where rank 0 was met."""
    if not dist.is_initialized():
        met = process_group.make(world, spec, plan.backend, plan.timeout, plan.device, plan.binding.device)
        return None, f"rank 0 at {met}"
    kept = init_request.adopt_process_group(world, plan)
    join.leave_rendezvous()  # all have come: they are in the group
    return kept, "in the process group that was there"


def _settle(plan: Plan, keep: bool) -> timedelta:
    """The timeout for collectives, which is another than the start-up's; then everything is read back.

    keep: as it is, since somebody else made the group and nobody asked.
    """
    changed = False if keep else process_group.set_timeout(plan.collective_timeout)
    bound = plan.binding.device or process_group.bound_to()
    process_group.verify(plan.device, plan.backend, plan.collective_timeout if changed else None, bound)
    found = process_group.timeout_of(plan.device) or plan.timeout
    if not changed and not keep:
        say(f"warning: backend {plan.backend} cannot change its timeout: collectives have {found} too")
    return found


def _report(world: World, plan: Plan, how: str, collectives: timedelta, notes: list[str]) -> None:
    shape = f"{_count(world.world_size, 'rank')} on {_count(world.nodes, 'node')} ({world.launcher})"
    timeouts = f"start-up timeout {plan.formula}, of collectives {collectives.total_seconds():g} s"
    say("; ".join([f"{shape}, {how}", timeouts, *filter(None, notes)]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def shutdown(timeout: timedelta = SHUTDOWN) -> None:
    """Take the process group down, DeepSpeed's module state too; init works again afterwards.

    Runs by itself at exit. Calling it twice, or without init, does nothing. A group that hpcinit did not make stays. If
    a peer that is dead or stuck holds the group up for longer than `timeout`, a warning says so and the process goes on
    to its end, without another group, with exit status 1.
    """
    if state.runtime is None:  # as in a child that was forked since
        return
    ended, state.runtime = state.runtime, None
    atexit.unregister(shutdown)
    join.leave_rendezvous()
    ended._session.close()
    _destroy(ended._session.kept_groups, ended._session.deepspeed, timeout, ended.device)


def _destroy(
    kept: frozenset[ProcessGroup] | None,
    deepspeed_started: bool,
    timeout: timedelta,
    device: torch.device | None = None,
) -> None:
    """Destroy the groups that hpcinit made. deepspeed_started: DeepSpeed was started from here, on top of the group."""
    if kept is None or deepspeed_started:
        deepspeed_setup.forget_deepspeed()
    if kept is None:
        destroy_process_groups(timeout, device)
    else:
        init_request.leave_process_group(kept)


_P = ParamSpec("_P")


def _as_session(start: Callable[_P, Runtime]) -> Callable[_P, AbstractContextManager[Runtime]]:
    """`with hpcinit.session(...) as run:` - init(...), and shutdown however the block ends."""

    @functools.wraps(start, assigned=())
    @contextmanager
    def session(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[Runtime]:
        runtime = start(*args, **kwargs)
        try:
            yield runtime
        except BaseException as error:
            program.record(error, runtime.world)  # before its peers see the group go, and tell of that
            raise
        finally:
            shutdown()

    session.__doc__ = _as_session.__doc__
    return session


session = _as_session(init)
