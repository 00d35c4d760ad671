"""What goes over a connection: JSON objects, one a line, and the proofs."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

GREETING = "hpcinit-meeting-1"
LONGEST_ERROR = 4_000  # characters of a rank's error that the others are told
LONGEST_LINE = 65_536  # a peer that sends more without a line end is none of ours


class NotOurs(Exception):
    """The other side does not speak our language, or does not hold our key."""


def proof(key: str, side: str, challenge: str, about: str) -> str:
    """That `side` holds the key, for one challenge; about: what else it vouches for (the rank)."""
    return hmac.new(key.encode(), f"{side}|{challenge}|{about}".encode(), hashlib.sha256).hexdigest()


def same(one: object, other: str) -> bool:
    return isinstance(one, str) and hmac.compare_digest(one.encode(), other.encode())


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
                message = json.loads(line)
            except (ValueError, RecursionError):
                raise NotOurs(f"not JSON: {line[:40]!r}") from None
            if not isinstance(message, dict):
                raise NotOurs(f"not an object: {line[:40]!r}")
            messages.append(message)
        return messages


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
