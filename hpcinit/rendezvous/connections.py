"""Everybody who has connected to rank 0's door: who they are is the door's business, their sockets are ours."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpcinit.base.console import say
from hpcinit.rendezvous import protocol
from hpcinit.rendezvous.roster import Guest

# How soon the door's thread gets its turn while rank 0's program imports and computes.

# Python lets a thread that wants to go on wait 5 ms for one that computes, and the door's thread wants to after every
# system call, of which a guest takes a dozen: 60 ms for each rank, while rank 0 imports torch. It costs the program
# nothing while nobody is at the door.
QUICK_S = 0.00002

_lock = threading.Lock()
_doors = 0
_before = 0.0


@contextmanager
def quick() -> Iterator[None]:
    """sys.setswitchinterval for the whole process, until the last of its doors is closed. A program's own stays."""
    global _doors, _before  # noqa: PLW0603 - so is the interval
    with _lock:
        if not _doors:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(QUICK_S)
        _doors += 1
    try:
        yield
    finally:
        with _lock:
            _doors -= 1
            if not _doors and abs(sys.getswitchinterval() - QUICK_S) < 1e-9:
                sys.setswitchinterval(_before)


# Who has not proved anything by then is shown out; among many, words that the kernel had dropped come again only later.
STRANGER_S, STRANGER_PER_RANK_S = 10.0, 0.002
UNAUTHENTICATED = 512  # connections, and one for each rank; half as many from one address


@dataclass(eq=False, slots=True)
class Caller:
    """One connection. where: our address and port, as this connection has them. peer: the other side's address.
    since: it has said something. heard: seconds since 1970 at which its last words were read.
    guest: the rank that it turned out to be. left: it has said goodbye."""

    socket: socket.socket
    where: tuple[Any, ...] = ("0.0.0.0", 0)
    peer: str = ""
    since: float = field(default_factory=time.monotonic)
    lines: protocol.Lines = field(default_factory=protocol.Lines)
    heard: float = 0.0
    challenge: str = ""
    guest: Guest | None = None
    left: bool = False

    def send(self, message: dict[str, Any]) -> None:
        self.send_line(protocol.encode(message))

    def send_line(self, line: bytes) -> None:
        # A line or two: the kernel's buffer takes it whole unless the peer has stopped reading. If the peer is
        # gone, the next read of this connection finds out.
        with contextlib.suppress(OSError):
            self.socket.send(line)


class Connections:
    """Reads from all of them in one thread, which sleeps while nobody says anything.

    hear: is called in that thread with each message; what it raises ends that connection only. unreadable: is called
    with what was wrong where that was no message. lose: is called when one has ended, and closes its socket. ranks: how
    many may come.

    Anyone can connect, so connections that are not authenticated are limited: in number, in all and from one address,
    and in time. Over a limit the oldest of them is closed. Those that are authenticated are never closed for others.
    """

    def __init__(
        self,
        listener: socket.socket,
        hear: Callable[[Caller, dict[str, Any]], None],
        unreadable: Callable[[Caller, Exception], None],
        lose: Callable[[Caller], None],
        ranks: int,
    ) -> None:
        self._listener, self._hear, self._unreadable, self._lose = listener, hear, unreadable, lose
        self._most = UNAUTHENTICATED + ranks
        self._stranger_s = STRANGER_S + ranks * STRANGER_PER_RANK_S
        self._stopping = self._said_out_of_files = False
        self._strangers: dict[Caller, None] = {}  # those who have not said anything for longest first
        self._by_peer: dict[tuple[str, bool], dict[Caller, None]] = {}  # the same, by address and how far they are
        listener.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for own in (self._listener, self._woken):
            self._selector.register(own, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hpcinit-door", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections, soon."""
        self._stopping = True
        with contextlib.suppress(OSError):  # the thread has ended by itself
            self._waker.send(b"!")

    def join(self, timeout_s: float) -> bool:
        """True if the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def forget(self) -> None:
        """In a forked child: close its copies of our own sockets."""
        for own in (self._listener, self._waker, self._woken):
            own.close()

    def _run(self) -> None:
        with quick():
            while not self._stopping:
                ready = self._selector.select(self._patience_s())
                looked = time.monotonic()
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._admit()
                    elif key.data is not None:
                        self._read(key.data)
                self._show_out(looked)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # all of them are sockets
        self._selector.close()
        self._waker.close()

    def _admit(self) -> None:
        """Some of those who wait: the rest come next, and those who are in are heard in between."""
        for _ in range(64):
            try:
                connection, peer = self._listener.accept()
            except OSError as error:  # nobody waits any more, or one is gone again
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    self._out_of_files()
                return
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                # Or a second line waits for the receipt of the first, which takes the peer's kernel 40 ms.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = Caller(connection, connection.getsockname(), str(peer[0]))
            self._selector.register(connection, selectors.EVENT_READ, caller)
            self._add(caller)
            self._limit(caller)

    def _add(self, caller: Caller) -> None:
        self._strangers[caller] = None
        self._by_peer.setdefault((caller.peer, bool(caller.challenge)), {})[caller] = None

    def _remove(self, caller: Caller) -> None:
        """From the unauthenticated ones, where it is one."""
        self._strangers.pop(caller, None)
        for greeted in (False, True):
            those = self._by_peer.get((caller.peer, greeted), {})
            if those.pop(caller, self) is None and not those:
                del self._by_peer[caller.peer, greeted]

    def _limit(self, caller: Caller) -> None:
        """Close the oldest that is not authenticated where they are too many, with `caller`, which is new.

        Those that know the name of the job are counted apart, so that mere connections do not push out a rank that
        waits for its answer.
        """
        same = self._by_peer[caller.peer, bool(caller.challenge)]
        if len(same) > self._most // 2:
            self._drop(next(iter(same)))
        elif len(self._strangers) > self._most:
            self._drop(next(iter(self._strangers)))

    def _drop(self, caller: Caller) -> None:
        self._remove(caller)
        self._selector.unregister(caller.socket)
        caller.socket.close()

    def _read(self, caller: Caller) -> None:
        if caller.socket.fileno() < 0:
            return  # closed since select() returned, for newer ones
        try:
            data = caller.socket.recv(65_536)
            if not data:
                raise EOFError
            caller.heard = protocol.local_time()
            messages = caller.lines.feed(data)
            for message in messages:
                self._hear(caller, message)
        except BlockingIOError:
            return
        except Exception as error:  # whatever a peer sends must not end this thread: all other ranks depend on it
            self._remove(caller)
            self._selector.unregister(caller.socket)
            self._unreadable(caller, error)
            self._lose(caller)
            return
        if messages and caller in self._strangers:
            self._remove(caller)
            if caller.guest is None:
                caller.since = time.monotonic()
                self._add(caller)
                self._limit(caller)

    def _patience_s(self) -> float | None:
        """How long until a stranger must be shown out; None while there is none."""
        longest = next(iter(self._strangers), None)
        return max(0.0, longest.since + self._stranger_s - time.monotonic()) if longest else None

    def _show_out(self, looked: float) -> None:
        """looked: up to when everything that they have said was read."""
        while (longest := next(iter(self._strangers), None)) and looked - longest.since >= self._stranger_s:
            self._drop(longest)

    def _out_of_files(self) -> None:
        if oldest := next(iter(self._strangers), None):
            self._drop(oldest)
            return
        if not self._said_out_of_files:
            self._said_out_of_files = True
            say(
                "rank 0 cannot take more connections: too many open files; it needs two for each rank: raise "
                "the hard limit (ulimit -Hn) on its node"
            )
        time.sleep(0.05)  # the kernel would tell of them again at once
