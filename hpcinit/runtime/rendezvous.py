"""Where the ranks meet: first at rank 0's door, then at torch's store, which only they can find."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from hpcinit.facts import runfolder
from hpcinit.facts.errors import BringUpError
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
    if world.rank == 0:
        _current = _open_door(world, key, job, made_of)
    else:
        deadline = time.monotonic() + timeout.total_seconds()
        _current = Visit(world, lambda: addresses(world), key, job, made_of, deadline)
    _generation += 1
    return _current


def _open_door(world: World, key: str, job: str, made_of: Mapping[str, str]) -> Door:
    problems = []
    for address in _own_addresses(world):
        try:
            return Door(world, address, key, job, made_of)
        except BringUpError as error:
            problems.append(str(error))
    raise BringUpError("\n".join(problems))


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


def addresses(world: World) -> list[str]:
    """What rank 0's name means on this node, IPv4 first. Raises OSError if it means nothing."""
    found = socket.getaddrinfo(world.master_addr, None, type=socket.SOCK_STREAM)
    unique = dict.fromkeys(str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET))
    routable = [address for address in unique if not _loopback(address)]
    # A host that maps its own name to 127.0.1.1 would listen where nobody else can reach it.
    return routable or list(unique)


def _own_addresses(world: World) -> list[str]:
    """Where rank 0 may listen: the addresses that its name means, the loopback only among nodes that are loopback."""
    try:
        found = addresses(world)
    except OSError as error:
        raise BringUpError(
            f"rank 0's own name {world.master_addr!r} does not resolve on its node: {error.strerror}; mend /etc/hosts "
            "or DNS there"
        ) from None
    if world.nodes > 1 and all(map(_loopback, found)) and not world.master_addr.startswith("127."):
        raise BringUpError(
            f"rank 0's name {world.master_addr!r} means {', '.join(found)} on its own node, where no other node can "
            "reach it: see the line for it in /etc/hosts"
        )
    return found


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def said_every_s(world: World) -> float:
    """torch's own cadence for barriers over a store: 10 s, and a second more per thousand ranks."""
    return 10 + world.world_size / 1000


def say(text: str) -> None:
    print(f"hpcinit: {text}", file=sys.stderr, flush=True)
