"""This rank's start-up events up to its first collective: each is appended to the file of its node when it occurs.

An event costs one write(2) to an open file, tens of microseconds, and is on disk whatever happens next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcinit.base import BEGAN, processes
from hpcinit.records import timeline
from hpcinit.rendezvous.process_state import state
from hpcinit.slurm import nodelist
from hpcinit.world import World, launchers

# One clock per process, and one for all ranks that a fork server forks: setting the node's clock during a start changes
# nothing.
_WALL, _MONOTONIC, _PID = BEGAN


def now() -> float:
    """Return the seconds since 1970."""
    return _WALL + time.monotonic() - _MONOTONIC


def begin_startup(world: World, run: Path | None, first_line: bool = False) -> None:
    """Open the node's file in the run folder `run` and write the first events. Do nothing the second time or without
    a folder.

    first_line: hpcinit was the first code that Python ran, so its first line is when the interpreter was ready.
    """
    mine = state.timeline
    if run is None or mine.opened:  # a process has one start: init() after a shutdown() is not another one
        return
    mine.opened = True
    mine.rank, mine.file = world.rank, _timeline_file(world, run)
    mine.writer = timeline.Writer(mine.file)
    mine.writer.write(mine.rank, {**_start_fields(world), **_events_before_writing(os.environ, first_line)})


def announce(world: World, run: Path) -> None:
    """Write the fork server's own events in the name of a rank that is not forked yet."""
    writer = timeline.Writer(_timeline_file(world, run))
    writer.write(world.rank, {**_start_fields(world), **_events_before_writing(os.environ, first_line=True)})
    writer.close()


def _timeline_file(world: World, run: Path) -> Path:
    """Return this node's file in the run folder."""
    return timeline.path(run, world.job, world.host or os.environ.get("SLURMD_NODENAME") or os.uname().nodename)


def _start_fields(world: World) -> dict[str, Any]:
    """Return the fields of the first record, which describe the start and this rank."""
    about: dict[str, Any] = {
        "job": world.job,
        "launcher": launchers.display_name(world, os.environ),
        "world_size": world.world_size,
        "nodes": world.nodes,
        "local_rank": world.local_rank,
        "pid": os.getpid(),
    }
    if world.local_rank == 0 and world.hosts:  # if a node does not start, the file of another one has its name
        about["hosts"] = nodelist.compress(world.hosts)
    return about


def record_event(event: str, **more: object) -> None:
    """Record that the event occurs now. more: further fields. The last event closes the record."""
    mine = state.timeline
    if mine.writer is not None:
        mine.writer.write(mine.rank, {event: round(now(), 6), **more})
        if event == timeline.LAST:
            mine.close()


def record_return() -> None:
    """Record that the program ended with status 0."""
    mine = state.timeline
    if mine.file is not None:
        writer = timeline.Writer(mine.file)
        writer.write(mine.rank, {timeline.RETURNED: round(now(), 6)})
        writer.close()


def _events_before_writing(env: Mapping[str, str], first_line: bool) -> dict[str, float]:
    """Return the events of this process before it could write."""
    found: dict[str, float | None] = {}
    found["allocated"] = _number_or_none(env.get(timeline.ENV_ALLOCATED, ""))
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
    """Return when this process was created, in seconds since 1970."""
    return _creation_time(os.getpid())


def _creation_time(pid: int) -> float | None:
    """Return when the kernel created this process, to a hundredth of a second, or None if that cannot be read."""
    try:
        ticks = int(processes.stat(pid)[22 - 3])  # starttime is the 22nd field, in clock ticks since the boot, proc(5)
        ago = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return None
    return now() - ago
