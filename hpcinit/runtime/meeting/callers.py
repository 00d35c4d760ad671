"""Everybody who has connected to rank 0's door: who they are is the door's business, their sockets are ours."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpcinit.runtime.meeting import wire
from hpcinit.runtime.meeting.roll import Guest

STRANGER_S = 10.0  # who has not proved anything by then is shown out


@dataclass(eq=False)
class Caller:
    """One connection. guest: the rank that it turned out to be. left: it has said goodbye."""

    socket: socket.socket
    since: float = field(default_factory=time.monotonic)
    lines: wire.Lines = field(default_factory=wire.Lines)
    challenge: str = ""
    guest: Guest | None = None
    left: bool = False

    def send(self, message: dict[str, Any]) -> None:
        # A line or two: the kernel's buffer takes it whole unless the peer has stopped reading. If the peer is
        # gone, the next read of this connection finds out.
        with contextlib.suppress(OSError):
            self.socket.send(wire.encode(message))


class Callers:
    """Reads from all of them in one thread, which sleeps while nobody says anything.

    hear: is called in that thread with each message; what it raises ends that connection only. lose: is called when
    one has ended, and closes its socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        hear: Callable[[Caller, dict[str, Any]], None],
        lose: Callable[[Caller], None],
    ) -> None:
        self._listener, self._hear, self._lose = listener, hear, lose
        self._stopping = False
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
        while not self._stopping:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fileobj is self._listener:
                    self._admit()
                elif key.data is not None:
                    self._read(key.data)
            self._show_out()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # all of them are sockets
        self._selector.close()
        self._waker.close()

    def _admit(self) -> None:
        try:
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            # Or a second line waits for the receipt of the first, which takes the peer's kernel 40 ms.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # gone again, or no file descriptor left
            return
        self._selector.register(connection, selectors.EVENT_READ, Caller(connection))

    def _read(self, caller: Caller) -> None:
        try:
            data = caller.socket.recv(65_536)
            if not data:
                raise EOFError
            for message in caller.lines.feed(data):
                self._hear(caller, message)
        except BlockingIOError:
            return
        except Exception:  # whatever a peer sends must not end this thread: all other ranks depend on it
            self._selector.unregister(caller.socket)
            self._lose(caller)

    def _strangers(self) -> list[Caller]:
        return [key.data for key in self._selector.get_map().values() if key.data and key.data.guest is None]

    def _patience_s(self) -> float | None:
        """How long until a stranger must be shown out; None while there is none."""
        since = [stranger.since for stranger in self._strangers()]
        return max(0.0, min(since) + STRANGER_S - time.monotonic()) if since else None

    def _show_out(self) -> None:
        for stranger in self._strangers():
            if time.monotonic() - stranger.since > STRANGER_S:
                self._selector.unregister(stranger.socket)
                stranger.socket.close()
