"""A guest's half of the handshake: is this our door, and does it let us in?"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcinit.facts.errors import BringUpError
from hpcinit.runtime.meeting import card, clock, wire

KNOCK_S = 3.0  # a server that has not proved itself by then is somebody else's


class Refused(BringUpError):
    """The door is ours, and it does not let this process in."""


class Silent(wire.NotOurs):
    """Somebody listens and has not said anything in time: another program, or our door behind a crowd."""


@dataclass(frozen=True)
class Claim:
    """What a process shows at the door. key: the secret of this submission. job: names this start."""

    rank: int
    key: str
    job: str
    made_of: Mapping[str, str]


class Welcome(NamedTuple):
    """An open connection; the port for a program's own rendezvous; what the door has said since; how far ahead rank 0's
    clock is."""

    socket: socket.socket
    lines: wire.Lines
    program_port: int
    rest: list[dict[str, Any]]
    offset: clock.Offset


def knock(address: str, port: int, claim: Claim, patience_s: float = KNOCK_S, deadline: float = 0.0) -> Welcome:
    """Raises Refused, and NotOurs with what was seen where this is not our door.

    patience_s: for the proof that it is ours. deadline: for its welcome then, on the monotonic clock; who hangs up
    after the proof is taken for dead, and a door on a busy node may well be slow.
    """
    until = time.monotonic() + patience_s
    try:
        connection = socket.create_connection((address, port), patience_s)
    except OSError as error:
        raise wire.NotOurs((error.strerror or str(error)).lower()) from None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _introduce(connection, claim, until, max(until, deadline))
    except TimeoutError:
        connection.close()
        raise Silent("somebody listens there who says nothing") from None
    except (OSError, EOFError, wire.NotOurs, KeyError):
        connection.close()
        raise wire.NotOurs("somebody else's server") from None
    except BaseException:
        connection.close()
        raise


def _introduce(connection: socket.socket, claim: Claim, until: float, deadline: float) -> Welcome:
    """The key itself is never sent."""
    mine, lines, offset = wire.challenge(), wire.Lines(), clock.Offset()
    sent = clock.now()
    connection.sendall(wire.encode({"hello": wire.GREETING, "job": claim.job, "challenge": mine}))
    (answer,) = wire.receive(connection, lines, until)[:1]
    offset.learn(sent, answer.get("clock"), clock.now())
    if not wire.same(answer["proof"], wire.proof(claim.key, "door", mine, claim.job)):
        raise wire.NotOurs("no proof")
    vouched = wire.proof(claim.key, "guest", answer["challenge"], str(claim.rank))
    hand = {"rank": claim.rank, "proof": vouched, "made_of": dict(claim.made_of), **card.identity()}
    sent = clock.now()
    connection.sendall(wire.encode(hand))
    first, *rest = wire.receive(connection, lines, deadline)
    offset.learn(sent, first.get("clock"), clock.now())
    if "refused" in first:
        raise Refused(first["refused"])
    return Welcome(connection, lines, int(first["welcome"]), rest, offset)
