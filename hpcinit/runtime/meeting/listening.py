"""Rank 0's ports: the first free candidate for the door, the next for a program's own rendezvous."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from hpcinit.facts import hosts, open_files
from hpcinit.facts.errors import BringUpError
from hpcinit.runtime.meeting import card, wire
from hpcinit.runtime.meeting.knocking import KNOCK_S, SAME_SECRET, Claim, Refused, knock

LISTEN = "0A"  # the state of a listener in /proc/net/tcp
FILES_BESIDES = 64  # Python's own, and rank 0's streams and sockets


def open_door(address: str, candidates: tuple[int, ...], claim: Claim) -> tuple[socket.socket, int]:
    """A listener, and the port for the program. Raises BringUpError; Refused if another process is rank 0 already.

    The last candidate is never the door's: a program's rendezvous must have a port too.
    """
    door, port, refused = _take(address, candidates)
    try:
        before = candidates.index(door.getsockname()[1]) if door else len(candidates)
        look_for_another(address, candidates[:before], claim)
        if door is None or port is None:
            raise _no_ports(address, door, refused)
    except BaseException:
        if door:
            door.close()
        raise
    return door, port


def _take(address: str, candidates: tuple[int, ...]) -> tuple[socket.socket | None, int | None, list[str]]:
    """The first free candidate as a listener, the next as a number, and why not the others."""
    door, refused = None, []
    for port in candidates:
        try:
            found = socket.create_server((address, port), family=wire.family(address), backlog=4096, reuse_port=False)
        except OSError as error:
            refused.append(f"{port}: {os.strerror(error.errno or 0)}")
            continue
        if door is None and port != candidates[-1]:
            door = found
            continue
        found.close()
        return door, port if door else None, refused
    return door, None, refused


def _no_ports(address: str, door: socket.socket | None, refused: list[str]) -> BringUpError:
    tried, here = "; ".join(refused), card.identity()
    if door is not None:
        return BringUpError(
            f"rank 0 found one free port at {address} and needs two, tried {tried}: end what listens there",
            quoted=tried,
        )
    return BringUpError(
        f"rank 0 (pid {here['pid']} on {here['host']}) cannot listen at {address}, tried ports {tried}: is {address} "
        "an address of this node, and are all these ports taken?",
        quoted=tried,
    )


def look_for_another(address: str, ports: Iterable[int], claim: Claim) -> None:
    """Raises Refused, in the words of the other, if another rank 0 of this very start has its door at one of `ports`.

    A rank 0 refuses a second one. Who accepts it instead is none, and yet holds the key: raises Refused as well.
    Takes no longer than one stranger's silence in all.
    """
    until = time.monotonic() + KNOCK_S
    for port in ports:
        with contextlib.suppress(wire.NotOurs):
            welcome = knock(address, port, claim, max(0.01, until - time.monotonic()))
            welcome.socket.close()
            here = card.identity()
            raise Refused(
                f"two processes act as rank 0 of this job: pid {here['pid']} on {here['host']}, and a process that "
                f"listens at {hosts.in_url(address, port)}{_owner(port)}, which accepted this one as if it were a rank "
                "of its own: no rank 0 does that. Another user may have found out the secret of this job: "
                f"{SAME_SECRET}"
            )


def _owner(port: int) -> str:
    """', started by user 1000' for who listens at `port` of this node; '' where the kernel does not show it."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for row in Path(table).read_text().splitlines()[1:]:
                words = row.split()  # sl local_address rem_address st ... uid
                if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    return f", started by user {words[7]}"
    return ""


def allow_many_files(ranks: int) -> None:
    """Raise the limit of open files, up to what the administrator allows. Raises BringUpError where that is not enough
    for a connection of each rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < ranks + FILES_BESIDES:
        raise BringUpError(
            f"rank 0 may have {hard} files open on {card.identity()['host']} (ulimit -Hn), and each of the {ranks} "
            f"ranks comes with two connections: raise the hard limit there to {2 * ranks + 1024} or more"
        )
    open_files.allow(ranks)
