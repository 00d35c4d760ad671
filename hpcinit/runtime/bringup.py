"""The functions with which training code starts and ends its process group: init, shutdown and session."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hpcinit.base import processes
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError
from hpcinit.base.processes import end_hard
from hpcinit.base.text import counted
from hpcinit.records import program_use, run_folder, safeguards, startup_settings
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Samples, Spec, Training, of_this_run
from hpcinit.records.startup_timeout import check_clock
from hpcinit.runtime import (
    deepspeed_setup,
    devices,
    extension_locks,
    init_request,
    mesh,
    private_names,
    process_group,
    program,
    seeds,
    startup,
    world_size_check,
)
from hpcinit.runtime.init_request import Plan, Request, resolve
from hpcinit.runtime.lifecycle import loader_workers, phase, sigterm, stack_signal, training_record
from hpcinit.runtime.process_state import state
from hpcinit.runtime.runtime import Runtime, Session
from hpcinit.world import World, launchers

# Process groups are destroyed within a time limit, even if a peer hangs.


def destroy_process_groups(timeout: timedelta, device: torch.device | None = None) -> None:
    """Destroy all of torch's process groups. If that takes longer than `timeout`, print a warning and return.

    After such a timeout, this process cannot create another group. It later exits with os._exit, because a normal exit
    would wait forever for the group's threads (https://github.com/pytorch/pytorch/issues/119250).
    """
    if state.stuck_group or not dist.is_initialized():
        return
    raised: list[BaseException] = []
    thread = threading.Thread(target=_destroy_groups, args=(device, raised), name="hpcinit-shutdown", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        state.stuck_group = (
            f"the process group was not destroyed within {timeout.total_seconds():g} s: another rank died or hangs; "
            "find the rank that failed first"
        )
        say(f"warning: {state.stuck_group}. This process continues without the group and will exit with status 1")
    elif raised:
        raise raised[0]


def refuse_if_stuck() -> None:
    """Raise BringUpError if an earlier process group of this process could not be destroyed."""
    if state.stuck_group:
        raise BringUpError(f"cannot create another process group in this process, because {state.stuck_group}")


def _destroy_groups(device: torch.device | None, raised: list[BaseException]) -> None:
    try:
        if device is not None and device.type != "cpu":
            torch.accelerator.set_device_index(device.index)  # the current device is per thread
        dist.destroy_process_group()
    except BaseException as error:
        raised.append(error)


@atexit.register
def _end_if_stuck() -> None:
    # Registered when this module is imported, so that it runs after the handlers that the program registers later.
    if state.stuck_group:
        end_hard(state.stuck_group)


# A group with living peers is destroyed in well under a second. 30 s is Slurm's default KillWait.
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
    started_by: str | None = None,
) -> Runtime:
    """Initialize this rank's process group and return its Runtime. Every rank must call it.

    If you omit an argument, hpcinit uses the value in the submission's config, or else the default below. A second call
    with the same arguments returns the same object. If the program has already created a process group that matches the
    arguments, hpcinit uses this group and never destroys it.

    Args:
        backend: the backend for tensors on this rank's device, or one per device type as in 'cpu:gloo,cuda:nccl'.
            With the latter, a rank without a GPU uses only cpu:gloo. Default: nccl on GPUs, gloo on CPUs.
        timeout: time limit of the start-up. Default: depends on the number of nodes and on the job's remaining time.
        collective_timeout: time limit of each collective after the start-up. Default: torch's, 600 s with nccl and
            1800 s with gloo.
        device_id: whether to bind the group to this rank's device: 'never', 'auto' or 'always'. Default: 'never'.
        deepspeed: also initialize DeepSpeed's communication. Default: only if the wrapper needs it.
        layout: how the ranks are divided into dimensions. Default: plain data parallelism.
        batch: samples per step. Default: micro batches of 1.
        training: how run.wrap() distributes the model. Default: DDP.
        seed: seed of the run, 0 to 2**63 - 1. Default: 0.
        seed_by: 'same': every rank gets `seed`. 'rank': each rank gets a different seed. 'data': each data parallel
            rank gets a different seed. Default: 'same'.
        deterministic: use deterministic algorithms, which are slower. Default: False.
        started_by: name of the launcher that started this process. Default: detected from the environment.

    Raises WorldError if the environment does not describe a consistent world, and RequestError if an argument is
    invalid. Raises BringUpError if the group could not be initialized, or exists with other settings.
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
        started_by=started_by,
    )
    if state.runtime is not None:
        if different := state.runtime._session.request.differences(request):
            raise BringUpError(
                f"init was called twice with different arguments: {different}; call it once, or call shutdown() first"
            )
        known: Runtime = state.runtime
        return known
    refuse_if_stuck()
    return _first_init(request)


def _first_init(request: Request) -> Runtime:
    world = launchers.read(os.environ, request.started_by)
    if world.rank == 0:
        for warning in world.warnings:
            say(f"warning: {warning}")
    world_size_check.check_own_group(os.environ, world)
    spec, folder = of_this_run(os.environ, world.world_size)
    adopted = dist.is_initialized()
    try:
        runtime = state.runtime = _bring_up(request, world, spec, folder)
    except BaseException:
        if not adopted:  # so that a second call can start over
            # Without a group, keep the rendezvous, because ranks may still have to connect to it.
            if dist.is_initialized():
                startup.leave_rendezvous()
            _destroy(None, deepspeed_started=True, timeout=SHUTDOWN)
        raise
    atexit.register(shutdown)
    if world.rank == 0 and spec and folder:
        program_use.advance(folder, program_use.of_spec(spec, program_use.INIT))
    return runtime


def _bring_up(request: Request, world: World, spec: Spec | None, folder: Path | None) -> Runtime:
    began = time.monotonic()
    startup.begin_startup(world, folder)
    stack_signal.install(world.rank)
    startup.reach("imported")
    processes.raise_open_files_limit(world.world_size)
    protected = safeguards.apply(os.environ, folder, world.job)
    if world.local_rank == 0:
        extension_locks.report_abandoned(os.environ, say)
    if doubt := check_clock(os.environ, time.time()):
        say(doubt)
    if world.rank == 0:
        private_names.report_lost("torch")
    device = devices.choose(world)  # before the group exists, because NCCL uses the current device
    plan = resolve(request, world, spec, device)
    notes = [devices.bind_cpus(world, device), plan.binding.why]
    if plan.deterministic:
        notes.extend(seeds.make_deterministic(os.environ))
    asked = {"timeout_s": plan.timeout.total_seconds(), "formula": plan.formula} if world.rank == 0 else {}
    kept, where = _group(world, spec, plan, asked)
    process_group.start_horovod(world)
    above = plan.deepspeed and deepspeed_setup.start_deepspeed(plan.backend, plan.collective_timeout, device)
    if above and world.rank == 0:
        private_names.report_lost("deepspeed")
    made = mesh.build_mesh(plan.layout, device)
    collectives = _settle(plan, keep=kept is not None and request.collective_timeout is None)
    loader_workers.install(plan.stopping.numbers)
    seeds.seed_all(seeds.of(plan.seed, plan.seed_by, world.rank, plan.layout.data_rank(world.rank)))
    startup.reach("up")
    training_record.begin(state.timeline.file, world.rank)
    if world.rank == 0:
        took_s = time.monotonic() - began
        timeouts = f"start-up timeout {plan.formula}, collective timeout {collectives.total_seconds():g} s"
        set_here = safeguards.describe(os.environ, protected)
        details = [line for line in (where, timeouts, *notes, set_here) if line]
        more = f"; more in {run_folder.STARTUP}" if folder else f"; more with {startup_settings.ENV_VERBOSE}=1"
        say(f"{_shape(world)}, {_by_device(plan)}, up in {took_s:.1f} s{more}")
        startup_settings.record(folder, world.job, details)
        if warning := devices.unseen(device):
            say(warning)
    session = Session(request, kept, above, collectives, first_step_watch=sigterm.watch_first_step(plan.stopping))
    return Runtime(world, plan, made, folder, session)


def _group(
    world: World, spec: Spec | None, plan: Plan, recorded: Mapping[str, object]
) -> tuple[frozenset[ProcessGroup] | None, str]:
    """Create torch's default process group, or use the one that the program has created.

    Also return a note for the log. If hpcinit created the group, the first value is None. Otherwise it contains the
    program's groups.
    """
    if not dist.is_initialized():
        device = plan.device, plan.binding.device
        met = process_group.make(world, spec, plan.torchs_backends, plan.timeout, *device, recorded)
        return None, f"rank 0 at {met}"
    startup.reach("device", **recorded)
    kept = init_request.adopt_process_group(world, plan)
    startup.leave_rendezvous()  # every rank has connected, because the group exists
    return kept, "in the program's own process group"


def _settle(plan: Plan, keep: bool) -> timedelta:
    """Set the timeout of collectives, and check the settings of the group. Return the timeout.

    keep: leave the timeout unchanged, because the program created the group and passed no collective_timeout.
    """
    changed = False if keep else process_group.set_timeout(plan.collective_timeout)
    bound = plan.binding.device or process_group.bound_to()
    process_group.verify(plan.device, plan.backends, plan.collective_timeout if changed else None, bound)
    found = process_group.timeout_of(plan.device) or plan.timeout
    if not changed and not keep:
        wanted = plan.collective_timeout.total_seconds()
        say(
            f"warning: collectives time out after {found.total_seconds():g} s, not {wanted:g} s: "
            f"torch cannot change the timeout of backend {plan.backend}"
        )
    return found


def _shape(world: World) -> str:
    launcher = launchers.display_name(world, os.environ)
    return f"{counted(world.world_size, 'rank')} on {counted(world.nodes, 'node')} ({launcher})"


def _by_device(plan: Plan) -> str:
    """Return which backend is used on which device, such as 'nccl on cuda:0 and gloo on cpu'."""
    others = [f"{name} on {kind}" for kind, name in plan.backends.items() if kind != plan.device.type]
    return " and ".join([f"{plan.backend} on {plan.device}", *others])


def shutdown(timeout: timedelta = SHUTDOWN) -> None:
    """Destroy the process group and reset DeepSpeed's module state. Afterwards, init() can be called again.

    hpcinit calls shutdown() at exit. A second call, or a call without init(), does nothing. A group that the program
    created is not destroyed. If a dead or hanging rank delays the shutdown for longer than `timeout`, print a warning
    and return. After that, this process cannot create another group, and will exit with status 1.

    Args:
        timeout: how long destroying the group may take.
    """
    if state.runtime is None:  # for example in a child that was forked after init
        return
    ended, state.runtime = state.runtime, None
    atexit.unregister(shutdown)
    if state.background_saves is not None:
        with phase.during("saving"):  # in a save, the rank survives SIGTERM until Slurm kills it
            state.background_saves.close(ended.checkpoint_timeout / 2)
    startup.leave_rendezvous()
    ended._session.close()
    _destroy(ended._session.kept_groups, ended._session.deepspeed, timeout, ended.device)


def _destroy(
    kept: frozenset[ProcessGroup] | None,
    deepspeed_started: bool,
    timeout: timedelta,
    device: torch.device | None = None,
) -> None:
    """Destroy the groups that hpcinit created, and clear DeepSpeed's references to them.

    kept: the program's groups, which are not destroyed. None: destroy all groups.
    deepspeed_started: whether hpcinit also initialized DeepSpeed.
    """
    if kept is None or deepspeed_started:
        deepspeed_setup.forget_deepspeed()
    if kept is None:
        destroy_process_groups(timeout, device)
    else:
        init_request.leave_process_group(kept)


_P = ParamSpec("_P")


def _as_session(start: Callable[_P, Runtime]) -> Callable[_P, AbstractContextManager[Runtime]]:
    """Return a context manager that calls init() with the same arguments, and shutdown() when the block ends."""

    @functools.wraps(start, assigned=())
    @contextmanager
    def session(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[Runtime]:
        runtime = start(*args, **kwargs)
        try:
            yield runtime
        except BaseException as error:
            program.record(error, runtime.world)  # before shutdown(), which makes the other ranks fail, too
            raise
        finally:
            shutdown()

    session.__doc__ = _as_session.__doc__
    return session


session = _as_session(init)
"""Return a context manager that calls init() with the same arguments, and shutdown() at the end, even after an error.

    with hpcinit.session() as run:
        print(run.rank)
"""
