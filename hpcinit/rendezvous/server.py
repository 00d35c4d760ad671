"""Rank 0's part of the rendezvous: a list of all ranks, their connections, and the server that lets them join.

The server announces each stage of the start-up to the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcinit.base import failure_kinds, processes
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError
from hpcinit.base.text import rank_names
from hpcinit.rendezvous import protocol
from hpcinit.rendezvous.protocol import StartupFailure
from hpcinit.rendezvous.rendezvous_client import CONNECT_S, JoinRequest, RendezvousEndpoint, Stage, connect
from hpcinit.slurm import nodelist
from hpcinit.world import World, network, ports

# The phases that a rank reports, in this order. 'started': hpcinit.run or init has found rank 0. 'imported': it is in
# init. 'joined': it has connected to torch's store. 'up': the process group works.
PHASES = ("started", "imported", "joined", "up")
LONGEST_LIST = 2_000  # characters of a list of ranks or nodes


@dataclass(slots=True)
class Peer:
    """A rank that has connected.

    since: when the rank reached its current phase, in seconds of time.monotonic().
    """

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
    """The list of all ranks of one attempt. It is not thread-safe: the owner must lock it.

    After each message, the server checks whether all ranks have reached a phase. To make this fast, the roster counts
    the ranks in each phase. It loops over all ranks only to list the missing ones.
    """

    def __init__(self, world_size: int, hosts: Sequence[str]) -> None:
        self.world_size = world_size
        self.hosts = hosts
        self.peers: dict[int, Peer] = {}
        self._host_of: dict[int, str] = {}  # each rank's host, if any peer has reported it
        self._reached = dict.fromkeys(PHASES, 0)

    def enter(self, peer: Peer, ranks_here: Iterable[int] = ()) -> None:
        """Add a rank that has connected. It replaces an earlier connection of the same rank.

        ranks_here: all ranks on the same node, if known.
        """
        self._host_of.update(dict.fromkeys(ranks_here, peer.host))
        if before := self.peers.get(peer.rank):
            self._count(before.phase, -1)
        self.peers[peer.rank] = peer
        self._count(peer.phase, 1)

    def move(self, peer: Peer, phase: str) -> None:
        """Record that a rank has reached a phase. Raise ValueError if there is no such phase."""
        PHASES.index(phase)
        self._count(peer.phase, -1)
        peer.phase, peer.since = phase, time.monotonic()
        self._count(phase, 1)

    def _count(self, phase: str, change: int) -> None:
        for reached in PHASES[: PHASES.index(phase) + 1]:
            self._reached[reached] += change

    def all_reached(self, phase: str) -> bool:
        return self._reached[phase] == self.world_size

    def first_dead(self) -> Peer | None:
        """Return the first rank that disconnected before it had finished its start-up."""
        lost = (peer for peer in self.peers.values() if peer.gone and not peer.reached("up"))
        return min(lost, key=lambda peer: peer.since, default=None)

    def lost(self) -> str:
        """Return a message about the first rank that died during start-up, or '' if none has died.

        An example is "rank 3 on n2 (pid 77) died during start-up, after phase 'started': ValueError: boom".
        """
        if (peer := self.first_dead()) is None:
            return ""
        why = f": {peer.error}" if peer.error else "; its log may show the reason"
        return f"rank {peer.rank} on {peer.host} (pid {peer.pid}) died during start-up, after phase '{peer.phase}'{why}"

    def missing(self, phase: str) -> str:
        """Return a message that names the ranks that have not reached `phase`, or '' if all ranks have.

        An example is '4 of 8 ranks are missing: rank 3 on n1, ranks 4-5 never connected (no rank connected from n3);
        ...'.
        """
        absent, late = self._absent(), self._late(phase)
        if not absent and not late:
            return ""
        parts = []
        if absent:
            empty = self._empty_hosts()
            where = f" (no rank connected from {_cut(nodelist.compress(empty))})" if empty else ""
            names = (rank_names(ranks) + (f" on {host}" if host else "") for host, ranks in absent.items())
            parts.append(f"{_cut(', '.join(names))} never connected{where}")
        for peer in late[:16]:
            waited = time.monotonic() - peer.since
            parts.append(
                f"rank {peer.rank} on {peer.host} (pid {peer.pid}) {peer.phase} {waited:.0f} s ago but got no further"
            )
        if len(late) > 16:
            parts.append(f"and {len(late) - 16} more")
        missing = sum(map(len, absent.values())) + len(late)
        return f"{missing} of {self.world_size} ranks are missing: " + "; ".join(parts)

    def first_missing(self, phase: str) -> tuple[int | None, str]:
        """Return the first rank that has not reached `phase`, and its host.

        Ranks on a host from which no rank has connected are first. An unknown rank is None, and an unknown host is ''.
        """
        for host, ranks in self._absent().items():
            if empty := self._empty_hosts():
                only = len(self.peers) == self.world_size - 1
                return (ranks[0] if only else None), empty[0]
            return ranks[0], host
        late = self._late(phase)
        return (late[0].rank, late[0].host) if late else (None, "")

    def _late(self, phase: str) -> list[Peer]:
        """Return the connected ranks that have not reached the phase, sorted by rank."""
        late = (peer for peer in self.peers.values() if not peer.reached(phase))
        return sorted(late, key=lambda peer: peer.rank)

    def _absent(self) -> dict[str, list[int]]:
        """Return the ranks that never connected, by host. The host is '' if no peer has reported it."""
        found: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            if rank not in self.peers:
                found.setdefault(self._host_of.get(rank, ""), []).append(rank)
        return found

    def _empty_hosts(self) -> list[str]:
        """Return the hosts from which no rank has connected."""
        seen = {peer.host for peer in self.peers.values()}
        return [host for host in dict.fromkeys(self.hosts) if host not in seen]


def _cut(text: str) -> str:
    """Shorten a long list, so that the message fits into protocol.LONGEST_LINE."""
    return text if len(text) <= LONGEST_LIST else f"{text[:LONGEST_LIST].rpartition(',')[0]},..."


# The server's thread must get the GIL quickly while rank 0's program imports and computes.
#
# By default, a thread waits 5 ms for the GIL after every system call if another thread computes. Accepting a rank takes
# about a dozen calls, so this would cost 60 ms per rank while rank 0 imports torch. A short interval slows down the
# program only while ranks connect.
QUICK_S = 0.00002


@dataclass(eq=False, slots=True)
class Connection:
    """A connection from another process, which may be a rank.

    challenge: the challenge that the process must answer. Set after its greeting.
    peer: the rank. Set after the process proved that it has the secret.
    received_at: when data last arrived, in seconds since 1970.
    said_goodbye: whether the rank announced that it would disconnect.
    """

    socket: socket.socket
    lines: protocol.Lines = field(default_factory=protocol.Lines)
    received_at: float = 0.0
    challenge: str = ""
    peer: Peer | None = None
    said_goodbye: bool = False

    def send(self, message: dict[str, Any]) -> None:
        self.send_line(protocol.encode(message))

    def send_line(self, line: bytes) -> None:
        # A line fits into the kernel's buffer unless the peer has stopped reading. If the peer has exited, the next
        # read from this connection reports that.
        with contextlib.suppress(OSError):
            self.socket.send(line)


class Connections:
    """Reads from all connections in one thread. The thread sleeps while no data arrives.

    The callbacks are called in that thread.

    on_message: a function that is called with each message. An exception in it ends only that connection.
    on_end: a function that is called after a connection's socket is closed, with the last error.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_message: Callable[[Connection, dict[str, Any]], None],
        on_end: Callable[[Connection, Exception], None],
    ) -> None:
        self._listener, self._on_message, self._on_end = listener, on_message, on_end
        self._stopping = self._reported_out_of_files = False
        listener.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for own in (self._listener, self._woken):
            self._selector.register(own, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hpcinit-rendezvous", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make the thread close all connections soon."""
        self._stopping = True
        with contextlib.suppress(OSError):  # the thread has already ended
            self._waker.send(b"!")

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the thread to end. Return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def forget(self) -> None:
        """In a forked child, close the child's copies of the sockets."""
        for own in (self._listener, self._waker, self._woken):
            own.close()

    def _run(self) -> None:
        """Serve all sockets until stop(). Runs in this object's thread."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(QUICK_S)
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._read(key.data)
        if abs(sys.getswitchinterval() - QUICK_S) < 1e-9:  # otherwise the program has set its own
            sys.setswitchinterval(before)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # all of them are sockets
        self._selector.close()
        self._waker.close()

    def _accept(self) -> None:
        """Accept up to 64 connections.

        The rest wait for the next round, so that connected peers are served in between.
        """
        for _ in range(64):
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:  # no connection is waiting any more, or the peer has disconnected
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    self._report_out_of_files()
                return
            with contextlib.suppress(OSError):
                accepted.setblocking(False)
                # Without this option, a second line waits 40 ms until the peer's kernel acknowledges the first one.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(accepted, selectors.EVENT_READ, Connection(accepted))

    def _read(self, connection: Connection) -> None:
        """Pass the messages that have arrived to the callback. End the connection on any error."""
        try:
            data = connection.socket.recv(65_536)
            if not data:
                raise EOFError
            connection.received_at = time.time()
            for message in connection.lines.feed(data):
                self._on_message(connection, message)
        except BlockingIOError:
            return
        except Exception as error:  # no message may end this thread, because all ranks depend on it
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._on_end(connection, error)

    def _report_out_of_files(self) -> None:
        if not self._reported_out_of_files:
            self._reported_out_of_files = True
            say(
                "rank 0 cannot accept more connections, because it has too many open files. It needs two for each "
                "rank: raise the hard limit (ulimit -Hn) on its node"
            )
        time.sleep(0.05)  # select() would report the waiting connection again immediately


# Rank 0's ports: the first free candidate for the server, the next one for the program's own rendezvous.

FILES_BESIDES = 64  # open files apart from connections: Python's files, and rank 0's streams and sockets


def listen(address: str, candidates: tuple[int, ...], request: JoinRequest) -> tuple[socket.socket, int]:
    """Listen on the first free candidate port. Return the listening socket and a second free port for the program.

    Raise BringUpError if two free ports are not available, and Refused if another process already acts as rank 0.
    """
    listener, refused = _bind(address, candidates[:-1])
    before = candidates.index(listener.getsockname()[1]) if listener else len(candidates)
    try:
        look_for_another_rank_0(address, candidates[:before], request)
        program, others = _bind(address, candidates[before + 1 :])
        if listener and program:
            with program:
                return listener, int(program.getsockname()[1])
        tried, here = "; ".join(refused + others), protocol.identity()
        raise BringUpError(
            f"rank 0 (pid {here['pid']} on {here['host']}) needs two free ports at {address}, but cannot listen on "
            f"ports {tried}. Check that {address} is an address of this node, and stop the programs that use these "
            "ports",
            quoted=tried,
        )
    except BaseException:
        if listener:
            listener.close()
        raise


def _bind(address: str, candidates: Iterable[int]) -> tuple[socket.socket | None, list[str]]:
    """Listen on the first free port. Also return why the ports before it are not free.

    If no port is free, the socket is None.
    """
    refused: list[str] = []
    for port in candidates:
        try:
            return socket.create_server((address, port), family=network.family(address), backlog=4096), refused
        except OSError as error:
            refused.append(f"{port}: {os.strerror(error.errno or 0)}")
    return None, refused


def look_for_another_rank_0(address: str, ports: Iterable[int], request: JoinRequest) -> None:
    """Raise Refused if another process acts as rank 0 of this attempt on one of `ports`.

    This happens if a profile or a shell sets RANK=0 or SLURM_PROCID=0. CONNECT_S limits the time for all ports
    together.
    """
    until = time.monotonic() + CONNECT_S
    for port in ports:
        with contextlib.suppress(protocol.NotOurs):
            connect(address, port, request, max(0.01, until - time.monotonic())).socket.close()


def allow_many_files(ranks: int) -> None:
    """Raise the limit of open files as far as the administrator allows.

    Raise BringUpError if the limit is then still too low for one connection per rank.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < ranks + FILES_BESIDES:
        raise BringUpError(
            f"rank 0 can have at most {hard} open files on {protocol.identity()['host']} (ulimit -Hn), but needs one "
            f"for each of the {ranks} ranks: for the rendezvous, and later for torch's store. Raise the hard limit "
            f"there to {2 * ranks + 1024} or more"
        )
    processes.raise_open_files_limit(ranks)


LATE_S = 15.0  # how long rank 0 serves the error after a failure: Slurm starts all tasks within seconds


class RendezvousServer(RendezvousEndpoint):
    """The server of the rendezvous, on rank 0. It listens on `address` in a separate thread until all ranks are up.

    Raise BringUpError if no candidate port is free, and Refused if another process already listens for this attempt.

    address: where the other ranks can reach rank 0.
    key: the secret of this submission.
    job: the name of this attempt.
    made_of: the fingerprint of this rank's environment.
    on_connected: a function that is called in a thread when all ranks have connected, and also by close().
    """

    def __init__(
        self,
        world: World,
        address: str,
        key: str,
        job: str,
        made_of: Mapping[str, str],
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(world)
        self.clock_offset_s = self.clock_uncertainty_s = 0.0
        self.roster = Roster(world.world_size, world.hosts)
        self.roster.enter(Peer(0, **protocol.identity()), world.ranks_here)
        self._authenticated: dict[Connection, None] = {}  # the authenticated ranks; guarded by _changed
        self._reported_missing: dict[str, tuple[float, StartupFailure]] = {}  # by phase: the time, and the failure
        self._request = JoinRequest(0, key, job, made_of)
        self._on_connected = on_connected
        self._reported_topics: set[str] = set()  # topics that are printed only once
        self._waited_long = False
        allow_many_files(world.world_size)
        fixed = bool(os.environ.get(ports.ENV_PORTS))  # use the user's ports even if they are unsafe
        candidates, warning = (world.master_ports, "") if fixed else ports.outside_ephemeral(world.master_ports)
        if warning:
            say(f"warning: {warning}")
        listener, self.program_port = listen(address, candidates, self._request)
        self.address = self.own_address = str(listener.getsockname()[0])
        self.port = int(listener.getsockname()[1])
        self._store_ports = world.master_ports if fixed else (0,)
        self._connections = Connections(listener, self._on_message, self._on_end)

    def report_phase(self, phase: str) -> None:
        with self._changed:
            self.roster.move(self.roster.peers[0], phase)
            self._announce_progress()

    def listen_for_store(self) -> socket.socket:
        """Return a listening socket for torch's store. It uses any free port, or one of comm.ports if that is set.

        Raise BringUpError if no port is free.
        """
        others = [port for port in self._store_ports if port not in (self.port, self.program_port)]
        found, refused = _bind(self.address, others)
        if found:
            return found
        tried = "; ".join(refused)
        raise BringUpError(
            f"rank 0 found no free port for torch's store at {self.address}, tried {tried}. hpcinit itself uses ports "
            f"{self.port} and {self.program_port} (MASTER_PORT). Stop the programs that use the other ports, or add "
            "ports to comm.ports",
            quoted=tried,
        )

    def offer_store(self, port: int) -> None:
        """Set the port of torch's store. The server announces the port when all ranks are ready for it."""
        with self._changed:
            self._store_port = port
            self._announce_progress()

    def missing(self, phase: str) -> str:
        with self._changed:
            missing = self.roster.missing(phase)
            if missing and len(self.roster.peers) == 1:
                missing += f"; no rank has connected to rank 0 at {network.in_url(self.address, self.port)}"
            return missing

    def fail(self, error: str) -> None:
        with self._changed:
            self._act_on_failure = None
            peer = self.roster.peers[0]
            if not peer.reached("up"):
                peer.error = error[: protocol.LONGEST_ERROR]
                self._mark_dead(peer)

    def linger_after_failure(self) -> None:
        deadline = time.monotonic() + LATE_S
        with self._changed:
            if not self._failure or self._waited_long or self.roster.all_reached("started"):
                return
            say(f"start-up failed; waiting up to {LATE_S:g} s to inform ranks that connect late: {self.failure}")
            while not self.roster.all_reached("started") and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def close(self) -> None:
        with self._changed:
            self._stop()
        self._connections.join(2)
        self._on_connected()

    def forget(self) -> None:
        for connection in self._authenticated:
            connection.socket.close()
        self._connections.forget()

    def _still_waiting(self, phase: str, left_s: float) -> None:
        say(f"waiting, {left_s:.0f} s left: {self.missing(phase)}")

    def _too_late(self, phase: str) -> StartupFailure:
        with self._changed:
            self._waited_long = True
            missing = self._missing(phase)
            self._fail(missing)
            return self._failure or missing

    def _missing(self, phase: str) -> StartupFailure:
        rank, host = self.roster.first_missing(phase)
        return StartupFailure(self.missing(phase), failure_kinds.START_UP, rank, host)

    # --- the stages: all of this is called under the lock

    def _announce_progress(self) -> None:
        """Advance through all stages that the ranks have reached, and announce each stage to the ranks."""
        if self.roster.all_reached("started") and self._advance(Stage.CONNECTED):
            threading.Thread(target=self._on_connected, name="hpcinit-all", daemon=True).start()
            self._send_all({"all": True})
        if self._store_port is not None and self.roster.all_reached("imported") and self._advance(Stage.STORE):
            self._send_all({"store": self._store_port})
        if self.roster.all_reached("up"):
            self._stop()
        if self._stage is Stage.FAILED:
            self._changed.notify_all()  # wakes up linger_after_failure()

    def _stop(self) -> None:
        """Announce to all ranks that their connections end on purpose, and close the connections."""
        self._advance(Stage.OVER)
        self._send_all({"closed": True})
        self._connections.stop()

    def _fail(self, reason: StartupFailure) -> None:
        """Report the first failure to all ranks. Ignore later ones, because they are consequences of the first."""
        if self._stage < Stage.OVER:
            self._send_all(reason.fields("failed"))
        super()._fail(reason)

    def _mark_dead(self, peer: Peer) -> None:
        peer.gone = True
        first = self.roster.first_dead()
        if (
            first and not self._failure
        ):  # otherwise, this is a consequence of the first failure, which is already reported
            self._fail(StartupFailure(self.roster.lost(), failure_kinds.PEER_LOST, first.rank, first.host))

    def _send_all(self, message: dict[str, Any]) -> None:
        line = protocol.encode(message)
        for connection in self._authenticated:
            connection.send_line(line)

    # --- the messages, in the thread of the connections

    def _on_message(self, connection: Connection, message: dict[str, Any]) -> None:
        """Handle a message according to the state of its connection. Then announce each stage that this completes."""
        with self._changed:
            if connection.peer is not None:
                self._handle_from_rank(connection, connection.peer, message)
            elif connection.challenge:
                self._check_proof(connection, message)
            else:
                self._challenge(connection, message)
            self._announce_progress()

    def _challenge(self, connection: Connection, message: dict[str, Any]) -> None:
        """Answer a greeting with rank 0's proof and a challenge. Raise NotOurs if the greeting is for another job."""
        if message.get("hello") != protocol.GREETING or message.get("job") != self._request.job:
            if str(message.get("hello")).startswith(protocol.PROTOCOL):
                # Send this, so that another version of hpcinit can report what it found.
                connection.send({"hello": protocol.GREETING})
            raise protocol.NotOurs("another job")
        key_id = protocol.key_id(self._request.key, self._request.job)
        if message.get("key_id") != key_id:
            self._report_once(
                "another secret",
                f"warning: a process at {connection.socket.getpeername()[0]} tried to connect to rank 0 of this job "
                f"with another secret, and rank 0 refused it. If it is one of your ranks, {protocol.SAME_SECRET}",
            )
        theirs, connection.challenge = protocol.text(message, "challenge", 100), protocol.challenge()
        proof = protocol.proof(self._request.key, "server", theirs, self._request.job)
        mine = {"proof": proof, "challenge": connection.challenge, "key_id": key_id}
        connection.send({"hello": protocol.GREETING, **mine, **protocol.stamp(connection.received_at)})

    def _check_proof(self, connection: Connection, message: dict[str, Any]) -> None:
        """Let a rank join after it proved that it has the key. Raise NotOurs for any other process."""
        rank = protocol.integer(message, "rank", 0, 2**31)
        proof = protocol.proof(self._request.key, "peer", connection.challenge, str(rank))
        if not protocol.same(message.get("proof"), proof):
            raise protocol.NotOurs("no proof")
        pid, made_of, here = protocol.integer(message, "pid", 0, 2**31), message.get("made_of"), message.get("here")
        peer = Peer(rank, protocol.text(message, "host", protocol.LONGEST_HOST), pid)
        if refusal := self._reason_to_refuse(peer):
            say(f"refused: {refusal}")
            connection.send({"refused": refusal})
            raise protocol.NotOurs(refusal)
        connection.peer = peer
        self.roster.enter(peer, [each for each in here if isinstance(each, int)] if isinstance(here, list) else [])
        self._authenticated[connection] = None
        connection.send({"reply": self.program_port, **protocol.stamp(connection.received_at)})
        if self._failure:
            connection.send(self._failure.fields("failed"))
        if different := protocol.differences(self._request.made_of, made_of if isinstance(made_of, dict) else {}):
            listed = ", ".join(different)[: protocol.LONGEST_ERROR]
            text = f"rank {rank} on {peer.host} runs a different environment: {listed}"
            self._fail(StartupFailure(text, failure_kinds.PROGRAM, rank, peer.host))

    def _reason_to_refuse(self, peer: Peer) -> str:
        """Return why an authenticated process cannot be the rank that it claims to be, or '' if it can.

        A new process can replace a rank that has disconnected, but it cannot replace rank 0.
        """
        before = self.roster.peers.get(peer.rank)
        if peer.rank >= self.roster.world_size:
            return f"rank {peer.rank} is not one of the {self.roster.world_size} ranks of this job"
        if before and (peer.rank == 0 or not before.gone):
            return (
                f"two processes claim rank {peer.rank}: pid {before.pid} on {before.host}, which was first, and pid "
                f"{peer.pid} on {peer.host}; unset RANK and SLURM_PROCID if they are left from an earlier job"
            )
        return ""

    def _handle_from_rank(self, connection: Connection, peer: Peer, message: dict[str, Any]) -> None:
        """Use the fields of a message from an authenticated rank. Warn about unreadable fields."""
        try:
            if "phase" in message:
                self.roster.move(peer, protocol.choice(message, "phase", PHASES))
            if "who" in message:
                missing = self._recently_missing(protocol.choice(message, "who", PHASES))
                connection.send(missing.fields("missing"))
            if "error" in message:
                peer.error = protocol.text(message, "error", protocol.LONGEST_ERROR)
        except protocol.NotOurs as error:
            self._report_once(
                f"unread {peer.rank}",
                f"warning: ignoring an unreadable message of rank {peer.rank} on {peer.host}: {error}; "
                f"{protocol.SAME_VERSION}",
            )
        if "error" in message and not peer.reached("up"):
            self._mark_dead(peer)
        connection.said_goodbye |= "bye" in message

    def _recently_missing(self, phase: str) -> StartupFailure:
        """Return the failure that lists the missing ranks.

        At the deadline, every rank requests this list, so it is computed at most once per second.
        """
        at, missing = self._reported_missing.get(phase, (-math.inf, None))
        if missing is None or time.monotonic() - at > 1:
            missing = self._missing(phase)
            self._reported_missing[phase] = (time.monotonic(), missing)
        return missing

    def _report_once(self, topic: str, text: str) -> None:
        """Print the text, unless one about the same topic was printed before."""
        if topic not in self._reported_topics:
            self._reported_topics.add(topic)
            say(text)

    def _on_end(self, connection: Connection, error: Exception) -> None:
        """Handle the end of a connection. A rank that has not finished start-up counts as dead."""
        with self._changed:
            peer = connection.peer
            if peer is None:
                return
            del self._authenticated[connection]
            if connection.said_goodbye or peer.reached("up"):
                return
            if isinstance(error, protocol.NotOurs) and not peer.error:
                peer.error = f"it sent data that is not a message: {error}; {protocol.SAME_VERSION}"
            self._mark_dead(peer)
