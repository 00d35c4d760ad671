"""What rank 0's server keeps: the roster of ranks, and the connections with their limits and timeouts."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpcinit.base.console import say
from hpcinit.base.text import rank_names
from hpcinit.rendezvous import protocol
from hpcinit.slurm import nodelist

# The phases that a rank reports, in this order. 'started': hpcinit.run or init has found rank 0. 'imported': it is in
# init. 'joined': it has connected to torch's store. 'up': the process group works.
PHASES = ("started", "imported", "joined", "up")
LONGEST_LIST = 2_000  # characters of a list of ranks or nodes


@dataclass(slots=True)
class Peer:
    """A rank that has connected. since: when it reached its phase, by time.monotonic()."""

    rank: int
    host: str
    pid: int
    phase: str = PHASES[0]
    since: float = field(default_factory=time.monotonic)
    error: str = ""
    gone: bool = False

    def reached(self, phase: str) -> bool:
        return PHASES.index(self.phase) >= PHASES.index(phase)


class Roster:
    """The list of all ranks of one start. It is not locked: its owner does that.

    Whether all ranks have reached a phase is counted, because every message checks it. Naming the missing ranks
    iterates over all of them.
    """

    def __init__(self, world_size: int, hosts: Sequence[str]) -> None:
        self.world_size = world_size
        self.hosts = hosts
        self.peers: dict[int, Peer] = {}
        self._host_of: dict[int, str] = {}  # the hosts of the ranks, also of absent ones, as far as peers reported them
        self._reached = dict.fromkeys(PHASES, 0)

    def enter(self, peer: Peer, ranks_here: Iterable[int] = ()) -> None:
        """Add the peer, instead of an earlier one of the same rank. ranks_here: all ranks of its node, if known."""
        self._host_of.update(dict.fromkeys(ranks_here, peer.host))
        if before := self.peers.get(peer.rank):
            self._count(before.phase, -1)
        self.peers[peer.rank] = peer
        self._count(peer.phase, 1)

    def move(self, peer: Peer, phase: str) -> None:
        """Record the phase. Raise ValueError if it is not one."""
        PHASES.index(phase)
        self._count(peer.phase, -1)
        peer.phase, peer.since = phase, time.monotonic()
        self._count(phase, 1)

    def _count(self, phase: str, change: int) -> None:
        """Add `change` to the counts of `phase` and of all phases before it."""
        for reached in PHASES[: PHASES.index(phase) + 1]:
            self._reached[reached] += change

    def all_reached(self, phase: str) -> bool:
        return self._reached[phase] == self.world_size

    def dead(self) -> list[Peer]:
        """Return the ranks that disconnected before they were up, the first to disconnect first."""
        lost = (peer for peer in self.peers.values() if peer.gone and not peer.reached("up"))
        return sorted(lost, key=lambda peer: peer.since)

    def missing(self, phase: str) -> str:
        """Return '4 of 8 ranks are missing: rank 3 on n1, ranks 4-5 never connected (no rank connected from n3); rank 6
        ...' or ''."""
        absent = self._absent()
        late = [peer for peer in self.peers.values() if not peer.reached(phase)]
        if not absent and not late:
            return ""
        parts = []
        if absent:
            empty = self._empty_hosts()
            where = f" (no rank connected from {_cut(nodelist.compress(empty))})" if empty else ""
            names = (rank_names(ranks) + (f" on {host}" if host else "") for host, ranks in absent.items())
            parts.append(f"{_cut(', '.join(names))} never connected{where}")
        for peer in sorted(late, key=lambda peer: peer.rank)[:16]:
            waited = time.monotonic() - peer.since
            parts.append(
                f"rank {peer.rank} on {peer.host} (pid {peer.pid}) {peer.phase} {waited:.0f} s ago but got no further"
            )
        if len(late) > 16:
            parts.append(f"and {len(late) - 16} more")
        missing = sum(map(len, absent.values())) + len(late)
        return f"{missing} of {self.world_size} ranks are missing: " + "; ".join(parts)

    def first_missing(self, phase: str) -> tuple[int | None, str]:
        """Return a missing rank and its host, or a host from which no rank connected, if there is one.

        Return None or '' for one that is not certain.
        """
        absent = self._absent()
        if absent:
            empty = self._empty_hosts()
            host, ranks = next(iter(absent.items()))
            if empty:
                only = len(absent) == 1 and len(ranks) == 1
                return (ranks[0] if only else None), empty[0]
            return ranks[0], host
        late = [peer for peer in self.peers.values() if not peer.reached(phase)]
        first = min(late, key=lambda peer: peer.rank, default=None)
        return (first.rank, first.host) if first else (None, "")

    def _absent(self) -> dict[str, list[int]]:
        """Return the ranks that never connected, by host; '' for a host that no peer has reported."""
        found: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            if rank not in self.peers:
                found.setdefault(self._host_of.get(rank, ""), []).append(rank)
        return found

    def _empty_hosts(self) -> list[str]:
        """Return the hosts from which no rank has connected."""
        seen = {peer.host for peer in self.peers.values()}
        return [host for host in dict.fromkeys(self.hosts) if host not in seen]

    def lost(self) -> str:
        """Return 'rank 3 on n2 (pid 77) died during start-up, after phase 'started': ValueError: boom', or ''."""
        first = self.dead()[:1]
        return "".join(
            f"rank {peer.rank} on {peer.host} (pid {peer.pid}) died during start-up, after phase '{peer.phase}'"
            + (f": {peer.error}" if peer.error else "; its own log may show the reason")
            for peer in first
        )


def _cut(text: str) -> str:
    """Shorten the list: a message is one line to every rank, at most protocol.LONGEST_LINE."""
    return text if len(text) <= LONGEST_LIST else f"{text[:LONGEST_LIST].rpartition(',')[0]},..."


# The server's thread must get its turn quickly while rank 0's program imports and computes.
#
# By default Python makes a thread wait 5 ms for the GIL while another one computes, after every system call. A peer
# needs about a dozen calls: 60 ms for each rank while rank 0 imports torch. While no rank connects, a short interval
# costs the program nothing.
QUICK_S = 0.00002

_lock = threading.Lock()
_servers = 0
_before = 0.0


@contextmanager
def quick_switching() -> Iterator[None]:
    """Shorten sys.setswitchinterval for the process until its last server is closed. Keep a value the program set."""
    global _servers, _before  # noqa: PLW0603 - so is the interval
    with _lock:
        if not _servers:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(QUICK_S)
        _servers += 1
    try:
        yield
    finally:
        with _lock:
            _servers -= 1
            if not _servers and abs(sys.getswitchinterval() - QUICK_S) < 1e-9:
                sys.setswitchinterval(_before)


# A connection without a valid proof is closed after this time. With many ranks Linux drops packets and resends them.
UNAUTHENTICATED_S, UNAUTHENTICATED_PER_RANK_S = 10.0, 0.002
UNAUTHENTICATED = 512  # connections, plus one for each rank; at most half of all may have the same address


@dataclass(eq=False, slots=True)
class Connection:
    """One connection.

    where: our address and port, as this connection sees them. remote: the peer's address. since: when it connected or
    last sent a message, by time.monotonic(). received_at: when its last data was read, in seconds since 1970.
    peer: the rank, once it is authenticated. said_goodbye: it has left on purpose.
    """

    socket: socket.socket
    where: tuple[Any, ...] = ("0.0.0.0", 0)
    remote: str = ""
    since: float = field(default_factory=time.monotonic)
    lines: protocol.Lines = field(default_factory=protocol.Lines)
    received_at: float = 0.0
    challenge: str = ""
    peer: Peer | None = None
    said_goodbye: bool = False

    def send(self, message: dict[str, Any]) -> None:
        self.send_line(protocol.encode(message))

    def send_line(self, line: bytes) -> None:
        # The kernel's buffer takes a line or two whole unless the peer has stopped reading. If the peer is gone, the
        # next read of this connection finds out.
        with contextlib.suppress(OSError):
            self.socket.send(line)


class Connections:
    """Read from all connections in one thread, which sleeps while no data arrives.

    The callbacks run in that thread. on_message: called with each message; an exception ends that connection only.
    on_unreadable: called with the error if data is not a message. on_disconnect: called when a connection has ended;
    must close its socket. ranks: the expected number of ranks.

    Anyone can connect, so unauthenticated connections are limited in number (in total and per address) and in time.
    Above a limit the oldest one is closed. Authenticated connections are never closed to make space.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_message: Callable[[Connection, dict[str, Any]], None],
        on_unreadable: Callable[[Connection, Exception], None],
        on_disconnect: Callable[[Connection], None],
        ranks: int,
    ) -> None:
        self._listener = listener
        self._on_message, self._on_unreadable, self._on_disconnect = on_message, on_unreadable, on_disconnect
        self._most = UNAUTHENTICATED + ranks
        self._unauthenticated_s = UNAUTHENTICATED_S + ranks * UNAUTHENTICATED_PER_RANK_S
        self._stopping = self._reported_out_of_files = False
        self._unauthenticated: dict[Connection, None] = {}  # the longest silent first
        # The same, by address and by whether they sent a greeting.
        self._by_remote: dict[tuple[str, bool], dict[Connection, None]] = {}
        listener.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for own in (self._listener, self._woken):
            self._selector.register(own, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hpcinit-rendezvous", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections soon, from their own thread."""
        self._stopping = True
        with contextlib.suppress(OSError):  # the thread has already ended
            self._waker.send(b"!")

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end. Return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def forget(self) -> None:
        """Close this process's copies of the sockets, in a forked child."""
        for own in (self._listener, self._waker, self._woken):
            own.close()

    def _run(self) -> None:
        """Serve all sockets until stop(). The thread of this object runs it."""
        with quick_switching():
            while not self._stopping:
                ready = self._selector.select(self._patience_s())
                read_until = time.monotonic()
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._read(key.data)
                self._close_silent(read_until)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # all of them are sockets
        self._selector.close()
        self._waker.close()

    def _accept(self) -> None:
        """Accept up to 64 connections. The next round takes more, so connected peers are served in between."""
        for _ in range(64):
            try:
                accepted, remote = self._listener.accept()
            except OSError as error:  # nothing is waiting any more, or the peer has gone again
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    self._handle_too_many_files()
                return
            with contextlib.suppress(OSError):
                accepted.setblocking(False)
                # Without it a second line waits for the receipt of the first, which takes the peer's kernel 40 ms.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(accepted, accepted.getsockname(), str(remote[0]))
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._add(connection)
            self._close_oldest_above_limit(connection)

    def _add(self, connection: Connection) -> None:
        """Add a connection to the unauthenticated ones, as the one that was silent for the shortest time."""
        self._unauthenticated[connection] = None
        self._by_remote.setdefault((connection.remote, bool(connection.challenge)), {})[connection] = None

    def _remove(self, connection: Connection) -> None:
        """Remove the connection from the unauthenticated ones, if it is one of them."""
        self._unauthenticated.pop(connection, None)
        for greeted in (False, True):
            those = self._by_remote.get((connection.remote, greeted), {})
            if those.pop(connection, self) is None and not those:
                del self._by_remote[connection.remote, greeted]

    def _close_oldest_above_limit(self, connection: Connection) -> None:
        """Close the oldest unauthenticated connection if `connection`, a new one, makes them too many.

        Connections that know the name of the job are counted separately. So other connections cannot push out a rank
        that waits for its reply.
        """
        same = self._by_remote[connection.remote, bool(connection.challenge)]
        if len(same) > self._most // 2:
            self._drop(next(iter(same)))
        elif len(self._unauthenticated) > self._most:
            self._drop(next(iter(self._unauthenticated)))

    def _drop(self, connection: Connection) -> None:
        self._remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _read(self, connection: Connection) -> None:
        """Pass the messages that have arrived to the callbacks; end the connection on any error."""
        if connection.socket.fileno() < 0:
            return  # closed since select() returned, to make space for newer connections
        try:
            data = connection.socket.recv(65_536)
            if not data:
                raise EOFError
            connection.received_at = protocol.local_time()
            messages = connection.lines.feed(data)
            for message in messages:
                self._on_message(connection, message)
        except BlockingIOError:
            return
        except Exception as error:  # nothing that a peer sends may end this thread: all other ranks depend on it
            self._remove(connection)
            self._selector.unregister(connection.socket)
            self._on_unreadable(connection, error)
            self._on_disconnect(connection)
            return
        if messages and connection in self._unauthenticated:
            self._remove(connection)
            if connection.peer is None:
                connection.since = time.monotonic()
                self._add(connection)
                self._close_oldest_above_limit(connection)

    def _patience_s(self) -> float | None:
        """Return the seconds until the next silent connection must be closed, or None if there is none."""
        longest = next(iter(self._unauthenticated), None)
        return max(0.0, longest.since + self._unauthenticated_s - time.monotonic()) if longest else None

    def _close_silent(self, read_until: float) -> None:
        """Close connections that were silent too long. read_until: the time up to which all data was read."""
        while (longest := next(iter(self._unauthenticated), None)) is not None:
            if read_until - longest.since < self._unauthenticated_s:
                return
            self._drop(longest)

    def _handle_too_many_files(self) -> None:
        """Make space by closing the oldest unauthenticated connection, or print a message once."""
        if oldest := next(iter(self._unauthenticated), None):
            self._drop(oldest)
            return
        if not self._reported_out_of_files:
            self._reported_out_of_files = True
            say(
                "rank 0 cannot accept more connections: too many open files; it needs two per rank: raise "
                "the hard limit (ulimit -Hn) on its node"
            )
        time.sleep(0.05)  # select() would report the waiting connection again immediately
