"""Where the ranks meet: first at rank 0's door, then at torch's store, which only they can find."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from hpcinit.facts import hosts, runfolder
from hpcinit.facts.spec import Spec
from hpcinit.facts.world import World, exports
from hpcinit.runtime.meeting import card
from hpcinit.runtime.meeting.door import Door
from hpcinit.runtime.meeting.visit import Visit

Meeting = Door | Visit

# The meeting of this process: hpcinit.run begins it, init goes on with it. After a shutdown a next one begins,
# with a number of its own, so that ranks of two generations never mix.
_current: Meeting | None = None
_generation = 0


def meet(world: World, spec: Spec | None, timeout: timedelta) -> Meeting | None:
    """Find the other ranks of this start; the meeting that is under way already, if there is one.

    None where there is nobody to meet, and under torchrun, whose agents have met. Raises BringUpError.
    """
    global _current, _generation  # noqa: PLW0603 - a process is in one meeting at a time
    if world.world_size == 1 or world.launcher == "torchrun":
        return None
    if _current is not None:
        return _current
    job = f"{world.job}#{_generation}"
    folder = Path(os.environ[runfolder.ENV_FOLDER]) if spec else None
    key, made_of = _key(world, spec), card.fingerprint(folder)
    notes: list[str] = []

    def resolve() -> list[str]:
        found = address(world, spec)
        notes[:] = [found.note] if found.note else []
        return [found.address]

    if world.rank == 0:
        _publish(world)
        _current = Door(world, resolve()[0], key, job, made_of)
    else:
        deadline = time.monotonic() + timeout.total_seconds()
        _current = Visit(world, resolve, key, job, made_of, deadline)
    for note in notes:
        say(note)
    _generation += 1
    return _current


def leave(error: str = "") -> None:
    """End this process's part in the meeting, telling the others why if it is because of an error."""
    global _current
    if _current is not None:
        meeting, _current = _current, None
        if error:
            meeting.fail(error)
        meeting.close()


def leave_together(world: World, timeout: timedelta) -> None:
    """End this process's part once all ranks have come: who comes late must still find the door.

    For programs that do not call init: a command replaces this process, a short script ends before slower ranks
    have started. Raises BringUpError that names who did not come.
    """
    if _current is not None:
        _current.wait_for_all(time.monotonic() + timeout.total_seconds(), said_every_s(world))
    leave()


def program_environment(world: World, meeting: Meeting | None) -> dict[str, str]:
    """torch's `env://` variables, with a port that was free on rank 0's host a moment ago."""
    env = exports(world)
    if meeting is not None:
        env["MASTER_PORT"] = str(meeting.program_port)
    return env


def _key(world: World, spec: Spec | None) -> str:
    """What only the ranks of this job know; without a submission, what at least tells jobs and restarts apart."""
    secret = spec.nonce if spec else os.environ.get("HPCINIT_NONCE", "")
    return hashlib.sha256(f"{secret}|{world.job}".encode()).hexdigest()


def address(world: World, spec: Spec | None) -> hosts.Found:
    """Where rank 0 is, as this node sees it. Raises WorldError with what to mend."""
    name = hosts.rename(_published(world) or world.master_addr, spec.comm.host_template if spec else "")
    return hosts.find(name, world.nodes, node_addr=_node_addr)


def _node_addr(host: str) -> str | None:
    """What Slurm calls the node's address, for names that do not resolve; None where nobody says."""
    if alias := hosts.node_aliases(os.environ.get("SLURM_NODE_ALIASES", "")).get(host):
        return alias
    try:
        done = subprocess.run(
            ["scontrol", "show", "node", host], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # containers often have no scontrol
    return next((word.partition("=")[2] for word in done.stdout.split() if word.startswith("NodeAddr=")), None)


def _publication(world: World) -> Path | None:
    folder = os.environ.get(runfolder.ENV_FOLDER)
    return Path(folder) / f"rank-0-of-{world.job}.txt" if folder else None


def _publish(world: World) -> None:
    """Rank 0 writes where it is, for ranks that cannot compute it (--distribution=arbitrary without its file)."""
    path = _publication(world)
    if path is not None and not world.master_known:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(world.master_addr)
        temporary.replace(path)


def _published(world: World) -> str:
    """What rank 0 has published, or ''."""
    path = _publication(world)
    try:
        return path.read_text() if path is not None else ""
    except OSError:
        return ""


def said_every_s(world: World) -> float:
    """torch's own cadence for barriers over a store: 10 s, and a second more per thousand ranks."""
    return 10 + world.world_size / 1000


def say(text: str) -> None:
    print(f"hpcinit: {text}", file=sys.stderr, flush=True)
