"""Rank 0's side: opens the door, keeps the roll, says where the store is."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcinit.facts.errors import BringUpError
from hpcinit.facts.world import World
from hpcinit.runtime.meeting import card, wire
from hpcinit.runtime.meeting.roll import Guest, Roll

STRANGER_S = 10.0  # who has not proved anything by then is shown out


@dataclass
class _Connection:
    socket: socket.socket
    since: float
    lines: wire.Lines = field(default_factory=wire.Lines)
    challenge: str = ""
    guest: Guest | None = None
    left: bool = False


class Door:
    """Listens on `address` in a thread of its own until everybody is up.

    address: where the ranks reach rank 0. key: the secret of this submission. job: names this start.
    made_of: what this rank's fingerprint is. Raises BringUpError if no candidate port is free.
    """

    def __init__(self, world: World, address: str, key: str, job: str, made_of: Mapping[str, str]) -> None:
        self.roll = Roll(world.world_size, world.hosts)
        self.failure = ""
        self._on_failure: Callable[[str], None] | None = None
        self._inside: list[_Connection] = []  # of ranks that were let in; changed and walked under _changed
        self._key, self._job, self._made_of = key, job, made_of
        self._changed = threading.Condition()
        self._store_port: int | None = None
        self._all_came = False
        self._said_store = False
        _allow_many_files(world.world_size)
        self._listener, self.program_port = _open(address, world.master_ports)
        self.address: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self.roll.guests[0] = Guest(0, **card.identity())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hpcinit-door", daemon=True)
        self._thread.start()

    def tell(self, phase: str) -> None:
        with self._changed:
            self.roll.guests[0].move(phase)
            self._react()

    def offer_store(self, port: int) -> None:
        """Where torch's store listens; the ranks hear of it when all of them are ready for it."""
        with self._changed:
            self._store_port = port
            self._react()

    def wait_for_all(self, deadline: float, every_s: float) -> None:
        """Until all ranks have come. Raises BringUpError."""
        self._wait(lambda: self._all_came, "started", deadline, every_s)

    def wait_for_store(self, deadline: float, every_s: float) -> int:
        """Until all ranks are in init; the port that was offered. Raises BringUpError."""
        self._wait(lambda: self._said_store, "imported", deadline, every_s)
        assert self._store_port is not None
        return self._store_port

    def _wait(self, done: Callable[[], bool], phase: str, deadline: float, every_s: float) -> None:
        """Says every `every_s` seconds for whom it waits; at the deadline tells everybody who is missing."""
        said = time.monotonic()
        with self._changed:
            while self.failure or not done():
                if self.failure:
                    raise BringUpError(self.failure)
                if time.monotonic() > deadline:
                    self._fail(self.roll.missing(phase))
                    raise BringUpError(self.failure)
                if time.monotonic() - said > every_s:
                    said = time.monotonic()
                    print(f"hpcinit: waiting: {self.roll.missing(phase)}", file=sys.stderr, flush=True)
                self._changed.wait(min(every_s, max(0.05, deadline - time.monotonic())))

    def missing(self, phase: str) -> str:
        with self._changed:
            return self.roll.missing(phase)

    def on_failure(self, act: Callable[[str], None] | None) -> None:
        """Call `act` when a rank fails, at once if one has already; None: nobody looks any more."""
        with self._changed:
            self._on_failure = act
            failure = self.failure
        if act and failure:
            act(failure)

    def fail(self, error: str) -> None:
        """This rank raised: tell all others why. This rank knows."""
        with self._changed:
            self._on_failure = None
            guest = self.roll.guests[0]
            if not guest.reached("up") and not self.failure:
                guest.error, guest.gone = error[: wire.LONGEST_ERROR], True
                self._fail(self.roll.lost())

    def close(self) -> None:
        with self._changed:
            self._close()
        self._thread.join(2)

    def forget(self) -> None:
        """Close this process's copies of the sockets; they live on in the parent."""
        for connection in self._inside:
            connection.socket.close()
        self._listener.close()

    # --- the thread

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.2):
                if key.data is None:
                    self._admit()
                else:
                    self._hear(key.data)
            self._show_out()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]  # all of them are sockets
        self._selector.close()

    def _admit(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again, or no file descriptor left
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Connection(connection, time.monotonic()))

    def _hear(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(65_536)
            if not data:
                raise EOFError
            for message in connection.lines.feed(data):
                with self._changed:
                    self._take(connection, message)
                    self._react()
        except BlockingIOError:
            return
        except Exception:  # whatever a peer sends must not end this thread: all other ranks depend on it
            self._lose(connection)

    def _take(self, connection: _Connection, message: dict[str, Any]) -> None:
        if connection.guest is not None:
            self._from_guest(connection, message)
        elif not connection.challenge:
            if message["hello"] != wire.GREETING or message["job"] != self._job:
                raise wire.NotOurs("another job")
            connection.challenge = wire.challenge()
            answer = wire.proof(self._key, "door", message["challenge"], self._job)
            self._send(connection, {"hello": wire.GREETING, "proof": answer, "challenge": connection.challenge})
        else:
            rank = message["rank"]
            if not isinstance(rank, int):
                raise wire.NotOurs("no rank")
            if not wire.same(message["proof"], wire.proof(self._key, "guest", connection.challenge, str(rank))):
                raise wire.NotOurs("no proof")
            self._register(connection, Guest(rank, str(message["host"]), int(message["pid"])), message["made_of"])

    def _from_guest(self, connection: _Connection, message: dict[str, Any]) -> None:
        guest = connection.guest
        assert guest is not None
        if "phase" in message:
            guest.move(str(message["phase"]))
        if "error" in message:
            guest.error = str(message["error"])
            if not guest.reached("up"):
                guest.gone = True
                self._fail(self.roll.lost())
        if "who" in message:
            self._send(connection, {"missing": self.roll.missing(str(message["who"]))})
        connection.left |= "bye" in message

    def _register(self, connection: _Connection, guest: Guest, made_of: dict[str, str]) -> None:
        before = self.roll.guests.get(guest.rank)
        if not 0 < guest.rank < self.roll.world_size:
            refusal = f"rank {guest.rank} is not one of the {self.roll.world_size} ranks of this job"
        elif before and not before.gone:
            refusal = (
                f"two processes claim rank {guest.rank}: pid {before.pid} on {before.host}, which came first, and pid "
                f"{guest.pid} on {guest.host}; is RANK or SLURM_PROCID left over in one of them?"
            )
        else:
            refusal = ""
        if refusal:
            print(f"hpcinit: refused: {refusal}", file=sys.stderr, flush=True)
            self._send(connection, {"refused": refusal})
            raise wire.NotOurs(refusal)
        connection.guest = self.roll.guests[guest.rank] = guest
        self._inside.append(connection)
        self._send(connection, {"welcome": self.program_port})
        if different := card.differences(self._made_of, made_of):
            self._fail(f"rank {guest.rank} on {guest.host} is not made like rank 0: {', '.join(different)}")

    def _react(self) -> None:
        """What follows from what has changed; under the lock."""
        if not self._all_came and self.roll.all_reached("started"):
            self._all_came = True
            self._send_all({"all": True})
        if not self._said_store and self._store_port is not None and self.roll.all_reached("imported"):
            self._said_store = True
            self._send_all({"store": self._store_port})
        if self.roll.all_reached("up"):
            self._close()
        self._changed.notify_all()

    def _close(self) -> None:
        """Say that the end of the connections is none of a rank; under the lock."""
        if not self._closing:
            self._send_all({"closed": True})
            self._closing = True

    def _fail(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            self._send_all({"failed": reason})
            self._changed.notify_all()
            if self._on_failure:
                self._on_failure(reason)

    def _lose(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        with self._changed:
            connection.socket.close()
            guest = connection.guest
            if guest is None:
                return
            self._inside.remove(connection)
            if connection.left or guest.reached("up"):
                return
            guest.gone = True
            self._fail(self.roll.lost())

    def _show_out(self) -> None:
        for key in list(self._selector.get_map().values()):
            stranger = key.data
            if stranger is not None and stranger.guest is None and time.monotonic() - stranger.since > STRANGER_S:
                self._selector.unregister(stranger.socket)
                stranger.socket.close()

    def _send_all(self, message: dict[str, Any]) -> None:
        for connection in self._inside:
            self._send(connection, message)

    def _send(self, connection: _Connection, message: dict[str, Any]) -> None:
        # A line or two: the kernel's buffer takes it whole unless the peer has stopped reading. If the peer is
        # gone, the next read of this connection finds out.
        with contextlib.suppress(OSError):
            connection.socket.send(wire.encode(message))


def _open(address: str, candidates: tuple[int, ...]) -> tuple[socket.socket, int]:
    """A listener on the first free candidate, and the next free port, for a program's own rendezvous.

    The last candidate is never the door's: a program's rendezvous must have a port too.
    """
    listener, refused = None, []
    for port in candidates:
        try:
            found = socket.create_server((address, port), family=wire.family(address), backlog=4096, reuse_port=False)
        except OSError as error:
            refused.append(f"{port}: {os.strerror(error.errno or 0)}")
            continue
        if listener is None and port != candidates[-1]:
            listener = found
            continue
        if listener is None:
            found.close()
            break
        found.close()
        return listener, port
    if listener is None:
        raise BringUpError(
            f"rank 0 cannot listen at {address}, tried ports {'; '.join(refused)}: is {address} an address of this "
            "node, and are all these ports taken?"
        )
    listener.close()
    raise BringUpError(
        f"rank 0 found one free port at {address} and needs two, tried {'; '.join(refused)}: end what listens there"
    )


def _allow_many_files(ranks: int) -> None:
    """One descriptor per rank, and some for the program; up to what the administrator allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ranks + 1024
    if soft != resource.RLIM_INFINITY and soft < needed:
        with contextlib.suppress(ValueError, OSError):
            most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
