"""Starts this process as a rank: connects it to the other ranks, and records the events of its start-up.

The events, up to the first collective, form the start-up timeline. Each event is appended to the node's file as soon as
it occurs, so it is recorded even if the rank then dies. Some events are also phases of the rendezvous. If a rank hangs
at start-up, rank 0 reports the last phase that this rank reached.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpcinit.base import BEGAN, processes
from hpcinit.base.console import say
from hpcinit.records import elastic_restarts, timeline
from hpcinit.records.spec import Spec
from hpcinit.rendezvous import join
from hpcinit.rendezvous.rendezvous_client import RendezvousEndpoint
from hpcinit.runtime.process_state import state
from hpcinit.slurm import nodelist
from hpcinit.world import World, exports, launchers, network

ENV_GLOO = "GLOO_SOCKET_IFNAME"

# Ranks of the same fork server inherit these values. now() uses them, so times stay consistent even if the node's clock
# is changed during the start-up.
_WALL, _MONOTONIC, _PID = BEGAN


def now() -> float:
    """Return the seconds since 1970."""
    return _WALL + time.monotonic() - _MONOTONIC


def begin_startup(world: World, run: Path | None, first_line: bool = False) -> None:
    """Open the node's timeline file in the run folder `run` and write the first events.

    Do nothing without a run folder, or if called a second time.

    first_line: whether hpcinit started before the program. If so, the start of hpcinit is recorded as the time at
        which the interpreter was ready.
    """
    mine = state.timeline
    if run is None or mine.opened:  # init() after a shutdown() is not another start
        return
    mine.opened = True
    mine.rank, mine.file = world.rank, _timeline_file(world, run)
    mine.writer = timeline.Writer(mine.file)
    mine.writer.write(mine.rank, {**_start_fields(world), **_events_before_writing(os.environ, first_line)})


def announce(world: World, run: Path) -> None:
    """Write the fork server's start-up events for a rank, before that rank is forked."""
    writer = timeline.Writer(_timeline_file(world, run))
    writer.write(world.rank, {**_start_fields(world), **_events_before_writing(os.environ, first_line=True)})
    writer.close()


def _timeline_file(world: World, run: Path) -> Path:
    return timeline.path(run, world.job, world.host or os.environ.get("SLURMD_NODENAME") or os.uname().nodename)


def _start_fields(world: World) -> dict[str, Any]:
    """Return the fields of the first record, which describe this start and this rank."""
    about: dict[str, Any] = {
        "job": world.job,
        "launcher": launchers.display_name(world, os.environ),
        "world_size": world.world_size,
        "nodes": world.nodes,
        "local_rank": world.local_rank,
        "pid": os.getpid(),
    }
    if world.local_rank == 0 and world.hosts:  # so that a reader knows the name of a node that wrote no file
        about["hosts"] = nodelist.compress(world.hosts)
    return about


# Maps events to the phases that rank 0 lists (rendezvous/server.py). After each but the last, a rank waits for others.
PHASES = {"device": "imported", "store": "joined", "collective": "up"}


def reach(event: str, **more: object) -> None:
    """Record that this rank has reached an event. If the event is a phase, also report it to rank 0.

    After the last event, the file is closed.

    more: additional fields for the record.
    """
    mine = state.timeline
    if mine.writer is not None:
        mine.writer.write(mine.rank, {event: round(now(), 6), **more})
        if event == timeline.LAST:
            mine.close()
            state.report("up")
    if state.rendezvous is not None and event in PHASES:
        state.rendezvous.report_phase(PHASES[event])


def join_rendezvous(world: World, spec: Spec | None, timeout: timedelta) -> RendezvousEndpoint | None:
    """Connect to the other ranks of this attempt, and return the rendezvous. A second call returns the same object.

    Return None for a single rank. Also return None if the user started torchrun, which has its own rendezvous. Raise
    BringUpError if a rank is missing.

    After shutdown(), a process can join again. Each rendezvous has a number, and only ranks with the same number
    connect.
    """
    if world.world_size == 1 or (world.launcher == "torchrun" and not world.hosts):
        return None
    if state.rendezvous is None:
        found = state.rendezvous = join.join(world, spec, timeout, state.rendezvous_count)
        state.rendezvous_count += 1
        clock = (found.clock_offset_s, found.clock_uncertainty_s)
        reach("met", **({} if None in clock else {"clock": clock}))
    return state.rendezvous


def leave_rendezvous(error: str = "") -> None:
    """Disconnect this process from the rendezvous, and report `error` to the other ranks."""
    if state.rendezvous is not None:
        rendezvous, state.rendezvous = state.rendezvous, None
        if error:
            rendezvous.fail(error)
            rendezvous.linger_after_failure()
        rendezvous.close()


def barrier_and_close(world: World, timeout: timedelta) -> None:
    """Wait until all ranks have connected to the rendezvous, and then disconnect this process.

    Programs that do not call init() need this: if rank 0 ends before slower ranks have started, they find no server.
    Raise a BringUpError that names the ranks that did not connect.
    """
    if state.rendezvous is not None:
        state.rendezvous.wait_for_all(time.monotonic() + timeout.total_seconds(), join.report_interval_s(world))
    leave_rendezvous()


def record_return() -> None:
    """Record in the timeline that the program ended with status 0."""
    mine = state.timeline
    if mine.file is not None:
        writer = timeline.Writer(mine.file)
        writer.write(mine.rank, {timeline.RETURNED: round(now(), 6)})
        writer.close()


def _events_before_writing(env: Mapping[str, str], first_line: bool) -> dict[str, float]:
    """Return the start-up events that occurred before this process opened the timeline file."""
    found: dict[str, float | None] = {}
    found["allocated"] = _number_or_none(env.get(timeline.ENV_ALLOCATED, ""))
    if elastic_restarts.ENV_ROUND in env:  # a warm restart: the fork server and its imports existed before
        found["started"] = found["forked"] = _creation_time(os.getpid())
        return {name: round(event, 6) for name, event in found.items() if event is not None}
    agent = env.get(timeline.ENV_AGENT_BEGAN)
    if agent is not None:
        found["started"] = _number_or_none(agent)
    found["started" if agent is None else "spawned"] = _creation_time(_PID)
    if first_line:
        found["interpreter"] = _WALL
    if os.getpid() != _PID:
        found["forked"] = _creation_time(os.getpid())
    return {name: round(event, 6) for name, event in found.items() if event is not None}


def _number_or_none(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdecimal() else None


def startup_began() -> float | None:
    """Return when the kernel created this process, in seconds since 1970, or None if unknown."""
    return _creation_time(os.getpid())


def _creation_time(pid: int) -> float | None:
    """Return when the kernel created the process `pid`, to a hundredth of a second, or None if unknown."""
    try:
        ticks = int(processes.stat(pid)[22 - 3])  # starttime is the 22nd field, in clock ticks since the boot, proc(5)
        ago = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return None
    return now() - ago


def program_environment(world: World, rendezvous: RendezvousEndpoint | None) -> dict[str, str]:
    """Return the environment variables for torch's `env://` and for gloo's network interface.

    MASTER_PORT is a port that was free on rank 0's host, unless the user has set it.
    """
    env = exports(world)
    if rendezvous is None:
        return env
    if len(world.master_ports) > 1:  # otherwise keep the single port that the user has set
        env["MASTER_PORT"] = str(rendezvous.program_port)
    if not world.master_known:
        env["MASTER_ADDR"] = rendezvous.address  # where rank 0 was found
    return env | _interface_for_gloo(world, rendezvous)


def _interface_for_gloo(world: World, rendezvous: RendezvousEndpoint) -> dict[str, str]:
    """Return the variable that makes gloo use the network interface that reaches rank 0.

    If gloo's default already has an address that other nodes can reach, return {}.
    """
    if world.nodes == 1 or ENV_GLOO in os.environ:
        return {}
    reason = network.blind_spot(socket.gethostname())
    name = network.holding(rendezvous.own_address) if reason else ""
    if not name or ipaddress.ip_address(rendezvous.own_address).is_loopback:
        return {}
    if world.local_rank == 0:
        say(
            f"{reason}, so gloo would listen where no other node reaches it: hpcinit set {ENV_GLOO}={name}, the "
            "interface that reaches rank 0"
        )
    return {ENV_GLOO: name}
