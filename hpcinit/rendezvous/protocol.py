"""Defines the messages of the rendezvous: one JSON object per line, with proofs, fingerprints and time stamps.

Before a process has proved that it has the key, its messages may contain anything. Even afterwards, they may be from
another version of hpcinit. So always read fields with text(), integer() and choice(), which raise NotOurs for an
unusable value.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcinit.base import failure_kinds
from hpcinit.base.errors import BringUpError

PROTOCOL = "hpcinit-rendezvous-"
GREETING = f"{PROTOCOL}3"
LONGEST_TEXT = 5_000  # characters of a text field; JSON uses up to 12 bytes for each
LONGEST_HOST = 255  # characters
LONGEST_ERROR = 4_000  # characters of a rank's error that the other ranks receive
LONGEST_LINE = 65_536  # a peer that sends more without a line end is not a rank of hpcinit

SAME_VERSION = "do all nodes use the same version of hpcinit?"
SAME_SECRET = (
    "start all ranks in one folder that their nodes share, or set HPCINIT_NONCE to the same random text for all ranks "
    "(export it in the batch script, before srun)"
)


class NotOurs(Exception):
    """The process at the other end does not use this protocol, or does not have the key of this job's ranks."""


def proof(key: str, side: str, challenge: str, about: str) -> str:
    """Return a proof that this side has the key. It is valid for one challenge only.

    side: which side gives the proof, so that the other side cannot send the same proof back.
    challenge: random text that the other side chose.
    about: what else the proof confirms, such as the rank.
    """
    signed = f"{side}|{challenge}|{about}".encode("utf-8", "surrogatepass")  # an unknown process may send any text
    return hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()


def same(one: object, other: str) -> bool:
    """Return whether a value from a message equals the expected proof `other`. Compare them in constant time.

    one: the value, which may have any type.
    """
    return isinstance(one, str) and one.isascii() and hmac.compare_digest(one, other)


def key_id(key: str, job: str) -> str:
    """Return a short identifier of the key that does not reveal the key.

    The handshake contains this identifier, so that a process can report a different key.
    """
    return proof(key, "key", "", job)[:8]


def text(message: dict[str, Any], name: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text field of a message, shortened by cut(). Raise NotOurs if the field is not a string."""
    value = message.get(name)
    if not isinstance(value, str):
        raise NotOurs(f"{name} is {_brief(value)}, expected a string")
    return cut(value, longest)


def cut(value: str, longest: int) -> str:
    """Return at most `longest` characters of a text that another process sent.

    Half a surrogate pair becomes '?', because it cannot be written to a file.
    """
    return value[:longest].encode("utf-8", "replace").decode(errors="replace")


def integer(message: dict[str, Any], name: str, least: int, most: int) -> int:
    """Return an integer from a message. Raise NotOurs if the value is not an integer from `least` to `most`."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise NotOurs(f"{name} is {_brief(value)}, expected a number from {least} to {most}")
    return value


def port(message: dict[str, Any], name: str) -> int:
    return integer(message, name, 1, 65_535)


def choice(message: dict[str, Any], name: str, known: Sequence[str]) -> str:
    """Return a field of a message whose value must be one of `known`. Raise NotOurs for any other value."""
    value = message.get(name)
    if value not in known:
        raise NotOurs(f"{name} is {_brief(value)}, expected one of {', '.join(known)}")
    return str(value)


def _brief(value: object) -> str:
    return ascii(value)[:60]


def challenge() -> str:
    return secrets.token_hex(16)


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lines:
    """Splits a stream of bytes into messages, one per line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add `data`, and return the messages that are now complete. Raise NotOurs if a line is not a JSON object."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE or any(len(line) > LONGEST_LINE for line in lines):
            raise NotOurs(f"a line of more than {LONGEST_LINE} bytes")
        messages = []
        for line in lines:
            try:
                message = json.loads(line, parse_constant=str)  # NaN and Infinity are not JSON
            except (ValueError, RecursionError):
                raise NotOurs(f"not JSON: {line[:40]!r}") from None
            if not isinstance(message, dict):
                raise NotOurs(f"not an object: {line[:40]!r}")
            messages.append(message)
        return messages


def receive(connection: socket.socket, lines: Lines, deadline: float | None = None) -> list[dict[str, Any]]:
    """Wait until `deadline` for at least one message, and return what has arrived.

    Raise NotOurs for an unusable message, EOFError if the other side closed the connection, and OSError for other
    errors, such as a timeout.

    deadline: a time of time.monotonic(), or None to wait forever.
    """
    while True:
        if deadline is not None:  # a timeout per read does not suffice, because a server may send one byte at a time
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise TimeoutError("no complete message arrived in time")
        data = connection.recv(65_536)
        if not data:
            raise EOFError("the connection was closed")
        if messages := lines.feed(data):
            return messages


# A rank sends its host, its process id and the fingerprint of its environment (world/fingerprint.py).

LONGEST_SHOWN = 400  # characters shown of another rank's value


def identity() -> dict[str, Any]:
    """Return the host name and the process id of this process."""
    return {"host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(), "pid": os.getpid()}


def differences(mine: Mapping[str, str], theirs: Mapping[str, Any]) -> list[str]:
    """Compare another rank's fingerprint with rank 0's. Return one text per difference.

    An example is 'torch 2.12.0 (rank 0 has 2.13.0)'.

    mine: rank 0's fingerprint.
    theirs: the other rank's fingerprint. It was sent over the network, so values may have any type and length.
    """
    return [
        f"{cut(key, LONGEST_SHOWN)} {cut(str(theirs.get(key, 'none')), LONGEST_SHOWN)} "
        f"(rank 0 has {mine.get(key, 'none')})"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    ]


# Why a start-up failed, as rank 0 reports it to all ranks.

KINDS = (failure_kinds.PROGRAM, failure_kinds.START_UP, failure_kinds.PEER_LOST)


@dataclass(frozen=True)
class StartupFailure:
    """Why the start-up failed.

    kind: one of KINDS.
    rank, host: the rank at fault and its host, or None and '' if unknown.
    """

    message: str
    kind: str = failure_kinds.PROGRAM
    rank: int | None = None
    host: str = ""

    def error(self) -> BringUpError:
        return BringUpError(self.message, kind=self.kind, rank_at_fault=self.rank, host_at_fault=self.host)

    def fields(self, name: str) -> dict[str, Any]:
        """Return the failure as fields of a message.

        name: the name of the field that contains the text.
        """
        return {name: self.message, "kind": self.kind, "rank": self.rank, "host": self.host}

    @classmethod
    def from_message(cls, message: dict[str, Any], name: str) -> StartupFailure:
        """Return the failure from a message that contains the fields of fields().

        If a field other than the text is unusable, use the field's default, because another version of hpcinit may have
        sent the message.

        name: the name of the field that contains the text.
        """
        kind, rank, host = message.get("kind"), message.get("rank"), message.get("host")
        return cls(
            cut(str(message[name]), LONGEST_TEXT),
            kind if kind in KINDS else failure_kinds.PROGRAM,
            rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31 else None,
            cut(host, LONGEST_HOST) if isinstance(host, str) else "",
        )


# The difference between rank 0's clock and this rank's clock, estimated from messages that are sent anyway.
#
# Rank 0's replies contain two times: when rank 0 read the peer's message, and when it sent the reply. A message arrives
# after it was sent, so each message limits the difference in one direction. If this rank sent a message at G and rank 0
# read it at D, rank 0's clock is at most D - G ahead. If rank 0 sent a reply at D and this rank read it at G, rank 0's
# clock is at least D - G ahead. The middle of the two limits is the offset, and half their distance is the uncertainty.
# This is NTP's estimate (RFC 5905, section 8), with the tightest limits of several messages.

LATEST = 1e11  # seconds since 1970: the year 5138


class ClockOffset:
    """Estimates how many seconds rank 0's clock is ahead of this node's clock."""

    def __init__(self) -> None:
        self._least, self._most = -math.inf, math.inf

    def learn(self, sent: float | None, stamp: object, read: float) -> None:
        """Improve the estimate with a reply of rank 0. Ignore invalid time stamps, because the start-up must not fail.

        sent: when this process sent the message, or None if rank 0 sent the reply unprompted.
        stamp: the two times in the reply, see stamp().
        read: when this process read the reply.
        """
        if not (isinstance(stamp, list) and len(stamp) == 2 and all(map(_is_time, stamp))):
            return
        received_at, sent_back = stamp
        if sent is not None:
            self._most = min(self._most, received_at - sent)
        self._least = max(self._least, sent_back - read)

    @property
    def known(self) -> tuple[float, float] | None:
        """Return how many seconds rank 0's clock is ahead of this node's, and the uncertainty.

        Before any reply, return None.
        """
        if math.isinf(self._least) or math.isinf(self._most):
            return None
        # If a clock was set or drifts, the lower limit may exceed the upper one. Their gap is then the uncertainty.
        return (self._least + self._most) / 2, abs(self._most - self._least) / 2


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LATEST


def stamp(received_at: float) -> dict[str, Any]:
    """Return the time stamps in a reply of rank 0: when it read the message, and the current time.

    received_at: when the message was read.
    """
    return {"clock": [received_at, time.time()]}
