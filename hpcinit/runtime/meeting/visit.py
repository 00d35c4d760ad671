"""Every other rank's side: knocks at the candidates until the door of its own job opens."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpcinit.facts.errors import BringUpError, WorldError
from hpcinit.facts.world import World
from hpcinit.runtime.meeting import card, wire

KNOCK_S = 3.0  # a server that has not proved itself by then is somebody else's


class Refused(BringUpError):
    """The door is ours, and it does not let this process in."""


class Visit:
    """A connection to rank 0's door, from the first knock until everybody is up.

    resolve: gives the addresses to try, anew each time (a name may resolve a moment later), or raises WorldError with
    the reason why there is none. deadline: on the
    monotonic clock. Raises BringUpError, with what was seen at each port, if the door does not open by then.
    """

    def __init__(
        self,
        world: World,
        resolve: Callable[[], list[str]],
        key: str,
        job: str,
        made_of: Mapping[str, str],
        deadline: float,
    ) -> None:
        self.failure = ""
        self._on_failure: Callable[[str], None] | None = None
        self.address = ""
        self.program_port = 0
        self._world, self._key, self._job, self._made_of = world, key, job, made_of
        self._changed = threading.Condition()
        self._store_port: int | None = None
        self._all_came = self._closed = False
        self._missing: str | None = None
        self._lines = wire.Lines()
        self._socket = self._find(resolve, deadline)
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="hpcinit-visit", daemon=True)
        self._thread.start()

    def _find(self, resolve: Callable[[], list[str]], deadline: float) -> socket.socket:
        seen: dict[str, str] = {}
        pause = 0.05
        while True:
            try:
                for address in resolve():
                    for port in self._world.master_ports:
                        if connection := self._knock(address, port, deadline, seen):
                            return connection
            except WorldError as error:
                seen[self._world.master_addr] = str(error)
            if time.monotonic() > deadline:
                raise BringUpError(self._no_door(seen))
            time.sleep(pause * random.uniform(0.5, 1.5))  # thousands of ranks must not knock in step
            pause = min(1.0, pause * 1.5)

    def _knock(self, address: str, port: int, deadline: float, seen: dict[str, str]) -> socket.socket | None:
        where = f"{address}:{port}"
        patience = max(0.1, min(KNOCK_S, deadline - time.monotonic()))
        try:
            connection = socket.create_connection((address, port), patience)
        except OSError as error:
            seen[where] = (error.strerror or str(error)).lower()
            return None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.program_port = self._introduce(connection)
        except Refused:
            connection.close()
            raise
        except (OSError, EOFError, wire.NotOurs, KeyError) as error:
            connection.close()
            silent = isinstance(error, TimeoutError)
            seen[where] = "somebody listens there who says nothing" if silent else "somebody else's server"
            return None
        self.address = address
        return connection

    def _introduce(self, connection: socket.socket) -> int:
        """The handshake; the port for a program's own rendezvous. The key itself is never sent."""
        until = time.monotonic() + KNOCK_S
        mine = wire.challenge()
        lines = self._lines = wire.Lines()
        connection.sendall(wire.encode({"hello": wire.GREETING, "job": self._job, "challenge": mine}))
        (answer,) = wire.receive(connection, lines, until)[:1]
        if not wire.same(answer["proof"], wire.proof(self._key, "door", mine, self._job)):
            raise wire.NotOurs("no proof")
        rank = self._world.rank
        vouched = wire.proof(self._key, "guest", answer["challenge"], str(rank))
        hand = {"rank": rank, "proof": vouched, "made_of": dict(self._made_of), **card.identity()}
        connection.sendall(wire.encode(hand))
        first, *rest = wire.receive(connection, lines, until)
        if "refused" in first:
            raise Refused(first["refused"])
        for message in rest:
            self._take(message)
        return int(first["welcome"])

    def tell(self, phase: str) -> None:
        self._send({"phase": phase})

    def wait_for_all(self, deadline: float, every_s: float) -> None:
        """Until all ranks have come. Raises BringUpError that names who has not."""
        self._wait(lambda: self._all_came, "started", deadline)

    def wait_for_store(self, deadline: float, every_s: float) -> int:
        """Where torch's store listens, once all ranks are in init. Raises BringUpError that names who is not."""
        self._wait(lambda: self._store_port is not None, "imported", deadline)
        assert self._store_port is not None
        return self._store_port

    def _wait(self, done: Callable[[], bool], phase: str, deadline: float) -> None:
        with self._changed:
            while self.failure or not done():
                if self.failure:
                    raise BringUpError(self.failure)
                if time.monotonic() > deadline:
                    break
                self._changed.wait(max(0.05, deadline - time.monotonic()))
            else:
                return
        raise BringUpError(self.missing(phase) or "rank 0 does not answer any more")

    def missing(self, phase: str) -> str:
        """Ask rank 0 who has not got that far; '' if it does not answer."""
        self._send({"who": phase})
        with self._changed:
            self._changed.wait_for(lambda: self._missing is not None or bool(self.failure), 2)
            return self.failure or self._missing or ""

    def on_failure(self, act: Callable[[str], None] | None) -> None:
        """Call `act` when a rank fails, at once if one has already; None: nobody looks any more."""
        with self._changed:
            self._on_failure = act
            failure = self.failure
        if act and failure:
            act(failure)

    def fail(self, error: str) -> None:
        self._send({"error": error[: wire.LONGEST_ERROR]})

    def close(self) -> None:
        """Leave in peace: rank 0 does not take it for a death, nor this rank rank 0's leave for one."""
        self._closed = True
        self._send({"bye": True})
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2)
        self._socket.close()

    def forget(self) -> None:
        """Close this process's copy of the socket; it lives on in the parent."""
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the listening thread finds out
            self._socket.sendall(wire.encode(message))

    def _listen(self) -> None:
        try:
            while True:
                for message in wire.receive(self._socket, self._lines):
                    self._take(message)
        except (OSError, EOFError, wire.NotOurs, ValueError):
            # All are up, or rank 0's program needed no more and it said so; else rank 0 is gone.
            if not self._closed and not self.failure:
                self._failed(f"rank 0 on {self._world.master_addr} ended during start-up; its log says why")

    def _take(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._failed(str(message["failed"]))
        with self._changed:
            self._all_came |= "all" in message
            self._closed |= "closed" in message
            if "store" in message:
                self._store_port = int(message["store"])
            if "missing" in message:
                self._missing = str(message["missing"])
            self._changed.notify_all()

    def _failed(self, reason: str) -> None:
        with self._changed:
            self.failure = self.failure or reason
            act = self._on_failure
            self._changed.notify_all()
        if act:
            act(reason)

    def _no_door(self, seen: Mapping[str, str]) -> str:
        me = f"rank {self._world.rank} on {card.identity()['host']}"
        what = "; ".join(f"{where}: {outcome}" for where, outcome in seen.items())
        return (
            f"{me} did not find rank 0 at {self._world.master_addr}: {what}. Did rank 0 start there, does the name "
            "mean the same host on this node, does a firewall stand between?"
        )
