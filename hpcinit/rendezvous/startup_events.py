"""This rank's way to its first collective: each moment is appended to its node's file as it comes.

A line costs a write(2) to an open file, tens of microseconds; what has been reached is on disk, whatever comes then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hpcinit
from hpcinit.records import timeline
from hpcinit.rendezvous.process_state import state
from hpcinit.slurm import nodelist
from hpcinit.world import World

# One clock per process, and with its parent's anchor one for all ranks that it forks: a clock that is set while they
# start moves nothing.
_WALL, _MONOTONIC, _PID = hpcinit.BEGAN


def now() -> float:
    """Seconds since 1970."""
    return _WALL + time.monotonic() - _MONOTONIC


def begin_startup(world: World, run: Path | None, first_line: bool = False) -> None:
    """Open the node's file in the run folder `run` and write what is known; not a second time, nor without a folder.

    first_line: hpcinit was the first that Python ran, so that its first line is when the interpreter was up.
    """
    mine = state.timeline
    if run is None or mine.opened:  # a process has one start: what init does after a shutdown is none
        return
    mine.opened = True
    mine.rank, mine.writer = world.rank, _open(world, run)
    mine.writer.write(mine.rank, {**_about(world), **_before(os.environ, first_line)})


def announce(world: World, run: Path) -> None:
    """By the parent of a rank that is not forked yet: the moments that are the parent's, in the rank's name."""
    writer = _open(world, run)
    writer.write(world.rank, {**_about(world), **_before(os.environ, first_line=True)})
    writer.close()


def _open(world: World, run: Path) -> timeline.Writer:
    host = world.host or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    return timeline.Writer(timeline.path(run, world.job, host))


def _about(world: World) -> dict[str, Any]:
    about: dict[str, Any] = {
        "job": world.job,
        "launcher": world.launcher,
        "world_size": world.world_size,
        "nodes": world.nodes,
        "local_rank": world.local_rank,
        "pid": os.getpid(),
    }
    if world.local_rank == 0 and world.hosts:  # whichever node does not come, another knows its name
        about["hosts"] = nodelist.compress(world.hosts)
    return about


def record_event(event: str, **more: object) -> None:
    """This moment is now. more: what else is known by then. Ends the record with the last moment."""
    mine = state.timeline
    if mine.writer is not None:
        mine.writer.write(mine.rank, {event: round(now(), 6), **more})
        if event == timeline.LAST:
            mine.close()


def _before(env: Mapping[str, str], first_line: bool) -> dict[str, float]:
    """The moments of this process before it could write."""
    found: dict[str, float | None] = {}
    found["allocated"] = _number(env.get(timeline.ENV_ALLOCATED, ""))
    agent = env.get(timeline.ENV_AGENT_BEGAN)
    if agent is not None:
        found["started"] = _number(agent)
    found["started" if agent is None else "spawned"] = _made(_PID)
    if first_line:
        found["interpreter"] = _WALL
    if os.getpid() != _PID:
        found["forked"] = _made(os.getpid())
    return {name: round(event, 6) for name, event in found.items() if event is not None}


def _number(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdecimal() else None


def startup_began() -> float | None:
    """When this process was made, in seconds since 1970."""
    return _made(os.getpid())


def _made(pid: int) -> float | None:
    """When the kernel made this process, to a hundredth of a second; None where that cannot be read."""
    try:
        # "4242 (name with ) and blanks) S ...": starttime is the 22nd field, in clock ticks since the boot, proc(5)
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        ago = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return now() - ago
