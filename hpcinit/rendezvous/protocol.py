"""The messages of the rendezvous: JSON objects, one per line, with proofs and time stamps.

A message is data from an unknown process until its proof has been checked, and may be of another version of hpcinit
after that: read its fields with text(), integer() and choice(), which raise NotOurs for a value that they cannot use.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import math
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

PROTOCOL = "hpcinit-rendezvous-"
GREETING = f"{PROTOCOL}2"
LONGEST_TEXT = 5_000  # characters of a text field: JSON makes up to 12 bytes of each
LONGEST_INTEGER = 20  # digits
LONGEST_HOST = 255  # characters
LONGEST_ERROR = 4_000  # characters of a rank's error that the others are told
LONGEST_LINE = 65_536  # a peer that sends more without a line end is none of ours


class NotOurs(Exception):
    """The other side does not speak our language, or does not hold our key."""


def proof(key: str, side: str, challenge: str, about: str) -> str:
    """That `side` holds the key, for one challenge; about: what else it vouches for (the rank)."""
    said = f"{side}|{challenge}|{about}".encode("utf-8", "surrogatepass")  # an unknown process may send any text
    return hmac.new(key.encode(), said, hashlib.sha256).hexdigest()


def same(one: object, other: str) -> bool:
    """Whether `one`, which may be anything, is the proof `other`. Takes the same time wherever they differ."""
    return isinstance(one, str) and one.isascii() and hmac.compare_digest(one, other)


def key_id(key: str, job: str) -> str:
    """Return a name for the key that does not reveal it, for messages about processes that hold different keys."""
    return proof(key, "key", "", job)[:8]


def endpoint(address: Sequence[Any], nat: bool) -> str:
    """Return '10.0.0.1:20417' of what getsockname() or getpeername() returned; with `nat`, the port alone.

    Both sides of a connection put the listener's endpoint into their proofs. A process that passes the messages of
    two others on listens at another endpoint, so its clients do not accept the proof.
    """
    if nat:
        return f"*:{address[1]}"
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return f"{mapped or host}:{address[1]}"


def text(message: dict[str, Any], name: str, longest: int = LONGEST_TEXT) -> str:
    """Return the text of a field, cut to `longest` characters and fit for a file. Raise NotOurs if it is no text."""
    value = message.get(name)
    if not isinstance(value, str):
        raise NotOurs(f"{name} is {_brief(value)}, expected a text")
    return cut(value, longest)


def cut(value: str, longest: int) -> str:
    """Return at most `longest` characters of a peer's text, without halves of surrogate pairs, which no file takes."""
    return value[:longest].encode("utf-8", "replace").decode(errors="replace")


def integer(message: dict[str, Any], name: str, least: int, most: int) -> int:
    """Return the integer of a field. Raise NotOurs unless it is one from `least` to `most`."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise NotOurs(f"{name} is {_brief(value)}, expected a number from {least} to {most}")
    return value


def port(message: dict[str, Any], name: str) -> int:
    return integer(message, name, 1, 65_535)


def choice(message: dict[str, Any], name: str, known: Sequence[str]) -> str:
    """Return a field that has one of the `known` values. Raise NotOurs for another one."""
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
    """Messages out of bytes as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete now. Raises NotOurs for anything that is not a JSON object."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE or any(len(line) > LONGEST_LINE for line in lines):
            raise NotOurs("a line without an end")
        messages = []
        for line in lines:
            try:
                message = json.loads(line, parse_constant=str, parse_int=_integer)  # NaN and Infinity are no JSON
            except (ValueError, RecursionError):
                raise NotOurs(f"not JSON: {line[:40]!r}") from None
            if not isinstance(message, dict):
                raise NotOurs(f"not an object: {line[:40]!r}")
            messages.append(message)
        return messages


def _integer(digits: str) -> int | str:
    """Return the number, or a text, which no field for numbers takes, where it is longer than any field's."""
    return int(digits) if len(digits) <= LONGEST_INTEGER else digits[:LONGEST_INTEGER]


def receive(connection: socket.socket, lines: Lines, deadline: float | None = None) -> list[dict[str, Any]]:
    """At least one message, until `deadline` on the monotonic clock. Raises NotOurs, OSError, EOFError."""
    while True:
        if deadline is not None:  # not the socket's timeout alone: a server may trickle
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise TimeoutError("no whole line in time")
        data = connection.recv(65_536)
        if not data:
            raise EOFError("the connection was closed")
        if messages := lines.feed(data):
            return messages


def family(address: str) -> socket.AddressFamily:
    """Of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# How far rank 0's clock is ahead of this rank's, from the messages of the rendezvous that are sent in any case.
#
# Rank 0 stamps its answers with [when it had read the peer's message, when it sent the answer]. Nothing arrives before
# it is sent, so each message bounds the difference from one side: 'heard at D what was sent at G' says that rank 0 is
# at most D - G ahead, 'read at G what was stamped D' that it is at least D - G ahead. The middle of the bounds is the
# offset, half their distance the uncertainty: NTP's estimate (RFC 5905, section 8) with the tightest bound of each
# direction in the place of one round trip.

LATEST = 1e11  # seconds since 1970: the year 5138


def local_time() -> float:
    """Seconds since 1970."""
    return time.time()


class ClockOffset:
    """Seconds that rank 0's clock is ahead of ours."""

    def __init__(self) -> None:
        self._least, self._most = -math.inf, math.inf

    def learn(self, sent: float | None, stamp: object, read: float) -> None:
        """sent: when we sent what `stamp` answers, None if it answers nothing. stamp: [heard, said] of rank 0.

        A stamp that is none is ignored: nobody's start-up fails for it.
        """
        if not (isinstance(stamp, list) and len(stamp) == 2 and all(map(_is_time, stamp))):
            return
        received_at, said = stamp
        if sent is not None:
            self._most = min(self._most, received_at - sent)
        self._least = max(self._least, said - read)

    @property
    def known(self) -> tuple[float, float] | None:
        """(offset, uncertainty): add the offset to a time of this node for rank 0's. None before an answer has come."""
        if math.isinf(self._least) or math.isinf(self._most):
            return None
        # Bounds that cross: one of the clocks was set meanwhile, or drifts. Their gap is what we do not know.
        return (self._least + self._most) / 2, abs(self._most - self._least) / 2


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LATEST


def stamp(received_at: float) -> dict[str, Any]:
    """What rank 0 puts into an answer: `heard` is when the message that it answers was read."""
    return {"clock": [received_at, local_time()]}
