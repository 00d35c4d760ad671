"""A guest's half of the handshake: is this our door, and does it let us in?"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcinit.facts.errors import BringUpError
from hpcinit.runtime.meeting import card, clock, wire

ENV_NAT = "HPCINIT_NAT"  # environment variable: the nodes see each other at translated addresses
SAME_VERSION = "do all nodes have the same hpcinit?"
SAME_SECRET = (
    "start all ranks in one folder that their nodes share, or set HPCINIT_NONCE to the same random text on all of them "
    "(export it in the batch script, before srun)"
)
KNOCK_S = 3.0  # a server that has not proved itself by then is somebody else's


class Refused(BringUpError):
    """The door is ours, and it does not let this process in."""


class Silent(wire.NotOurs):
    """Somebody listens and has not said anything in time: another program, or our door behind a crowd."""


class NotRank0(wire.NotOurs):
    """It answers as rank 0 would, but its proof is not valid for this connection; the message says what is known."""


@dataclass(frozen=True)
class Claim:
    """What a process shows at the door. key: the secret of this submission. job: names this start.

    nat: addresses are translated between the nodes, so proofs contain the port alone.
    """

    rank: int
    key: str
    job: str
    made_of: Mapping[str, str]
    nat: bool = False


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
    except NotRank0 as error:
        connection.close()
        raise wire.NotOurs(str(error)) from None
    except (OSError, EOFError, wire.NotOurs):
        connection.close()
        raise wire.NotOurs("somebody else's server") from None
    except BaseException:
        connection.close()
        raise


def _introduce(connection: socket.socket, claim: Claim, until: float, deadline: float) -> Welcome:
    """The key itself is never sent."""
    mine, lines, offset = wire.challenge(), wire.Lines(), clock.Offset()
    at = wire.endpoint(connection.getpeername(), claim.nat)
    own_id = wire.key_id(claim.key, claim.job)
    sent = clock.now()
    hello = {"hello": wire.GREETING, "job": claim.job, "challenge": mine, "key_id": own_id}
    connection.sendall(wire.encode(hello))
    (answer,) = wire.receive(connection, lines, until)[:1]
    read = clock.now()
    _check_proof(answer, claim, mine, at)  # before anything else in the answer is looked at
    offset.learn(sent, answer.get("clock"), read)
    vouched = wire.proof(claim.key, "guest", wire.text(answer, "challenge"), f"{at}|{claim.rank}")
    hand = {"rank": claim.rank, "proof": vouched, "made_of": dict(claim.made_of), **card.identity()}
    sent = clock.now()
    connection.sendall(wire.encode(hand))
    first, *rest = wire.receive(connection, lines, deadline)
    offset.learn(sent, first.get("clock"), clock.now())
    if "refused" in first:
        raise Refused(wire.text(first, "refused"))
    try:
        return Welcome(connection, lines, wire.port(first, "welcome"), rest, offset)
    except wire.NotOurs as error:
        raise Refused(f"rank 0 at {at} answers in a way that is not understood ({error}): {SAME_VERSION}") from None


def _check_proof(answer: dict[str, Any], claim: Claim, challenge: str, at: str) -> None:
    """Raise NotRank0 unless the peer holds our key and is itself the listener at `at`."""

    def proves(where: str) -> bool:
        return wire.same(answer.get("proof"), wire.proof(claim.key, "door", challenge, f"{where}|{claim.job}"))

    if proves(at):
        return
    there, key_id, hello = answer.get("at"), answer.get("key_id"), answer.get("hello")
    if isinstance(there, str) and len(there) < 100 and proves(there):
        raise NotRank0(
            f"passes on the answers of rank 0, which listens at {there}: another process is in between, or the network "
            f"translates addresses (then set {ENV_NAT}=1 on all ranks)"
        )
    if isinstance(hello, str) and hello.startswith(wire.PROTOCOL) and "proof" not in answer:
        raise NotRank0("hpcinit of another job, start or version")
    if isinstance(key_id, str) and key_id != wire.key_id(claim.key, claim.job):
        raise NotRank0(f"a process of this job that holds another secret: {SAME_SECRET}")
    raise NotRank0("somebody else's server")
