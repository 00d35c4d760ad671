"""Rank 0's side: listens, keeps the roster of ranks, and announces torch's store."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import failure_kinds, processes
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError
from hpcinit.rendezvous import nonce, protocol
from hpcinit.rendezvous.connections import PHASES, Connection, Connections, Peer, Roster
from hpcinit.rendezvous.protocol import StartupFailure
from hpcinit.rendezvous.rendezvous_client import (
    CONNECT_S,
    SAME_SECRET,
    SAME_VERSION,
    JoinRequest,
    Refused,
    RendezvousEndpoint,
    connect,
)
from hpcinit.world import World, network, ports

# Rank 0's ports: the first free candidate for the server, the next one for the program's own rendezvous.

LISTEN = "0A"  # the state of a listener in /proc/net/tcp
FILES_BESIDES = 64  # Python's files, and rank 0's streams and sockets


def listen(address: str, candidates: tuple[int, ...], request: JoinRequest) -> tuple[socket.socket, int]:
    """Return a listener and the port for the program. Raise BringUpError, or Refused if another process is rank 0.

    The last candidate is never the server's, because the program's rendezvous needs a port too.
    """
    listener, port, refused = _bind_candidates(address, candidates)
    try:
        before = candidates.index(listener.getsockname()[1]) if listener else len(candidates)
        look_for_another_rank_0(address, candidates[:before], request)
        if listener is None or port is None:
            raise _no_ports(address, listener, refused)
    except BaseException:
        if listener:
            listener.close()
        raise
    return listener, port


def _bind_candidates(address: str, candidates: tuple[int, ...]) -> tuple[socket.socket | None, int | None, list[str]]:
    """Return the first free candidate as a listener, the next one as a number, and why the others are not free."""
    listener, refused = None, []
    for port in candidates:
        try:
            found = socket.create_server((address, port), family=network.family(address), backlog=4096)
        except OSError as error:
            refused.append(f"{port}: {os.strerror(error.errno or 0)}")
            continue
        if listener is None and port != candidates[-1]:
            listener = found
            continue
        found.close()
        return listener, port if listener else None, refused
    return listener, None, refused


def _no_ports(address: str, listener: socket.socket | None, refused: list[str]) -> BringUpError:
    """Return the error for too few free ports. listener: bound to the only free one, if any."""
    tried, here = "; ".join(refused), protocol.identity()
    if listener is not None:
        return BringUpError(
            f"rank 0 found only one free port at {address} and needs two, tried {tried}: stop what listens there",
            quoted=tried,
        )
    return BringUpError(
        f"rank 0 (pid {here['pid']} on {here['host']}) cannot listen at {address}, tried ports {tried}: check that "
        f"{address} is an address of this node, and stop what uses these ports",
        quoted=tried,
    )


def look_for_another_rank_0(address: str, ports: Iterable[int], request: JoinRequest) -> None:
    """Raise Refused, with the other's message, if another rank 0 of this start listens on one of `ports`.

    A real rank 0 refuses a second one. A process that accepts it is not rank 0 and yet has the key: raise Refused as
    well. All ports together take no longer than one silent connection.
    """
    until = time.monotonic() + CONNECT_S
    for port in ports:
        with contextlib.suppress(protocol.NotOurs):
            reply = connect(address, port, request, max(0.01, until - time.monotonic()))
            reply.socket.close()
            here = protocol.identity()
            raise Refused(
                f"two processes act as rank 0 of this job: pid {here['pid']} on {here['host']}, and a process that "
                f"listens at {network.in_url(address, port)}{_owner_of_port(port)}, which accepted this one as a rank. "
                "A real rank 0 never does that. Another user may have found out the secret of this job: "
                f"{SAME_SECRET}"
            )


def _owner_of_port(port: int) -> str:
    """Return ', started by user 1000' for the listener at `port` of this node; '' if the kernel does not show it."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for row in Path(table).read_text().splitlines()[1:]:
                words = row.split()  # sl local_address rem_address st ... uid
                if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    return f", started by user {words[7]}"
    return ""


def allow_many_files(ranks: int) -> None:
    """Raise the limit of open files as far as the administrator allows. Raise BringUpError if that is less than one
    connection for each rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < ranks + FILES_BESIDES:
        raise BringUpError(
            f"rank 0 may only have {hard} open files on {protocol.identity()['host']} (ulimit -Hn), but each of the "
            f"{ranks} ranks needs two connections: raise the hard limit there to {2 * ranks + 1024} or more"
        )
    processes.raise_open_files_limit(ranks)


LATE_S = 15.0  # after a failure, ranks that connect this late still get the error: Slurm starts tasks within seconds


class RendezvousServer(RendezvousEndpoint):
    """Listens on `address` in a separate thread until all ranks are up; the thread sleeps while no data arrives.

    address: where the ranks reach rank 0. key: the secret of this submission. job: the name of this start.
    made_of: this rank's fingerprint. nat: the other nodes reach this one at a translated address.
    Raise BringUpError if no candidate port is free, Refused if another process already listens for this start.
    """

    def __init__(
        self,
        world: World,
        address: str,
        key: str,
        job: str,
        made_of: Mapping[str, str],
        nat: bool = False,
    ) -> None:
        super().__init__()
        self.clock_offset_s = self.clock_uncertainty_s = 0.0
        self.roster = Roster(world.world_size, world.hosts)
        self.roster.enter(Peer(0, **protocol.identity()), world.ranks_here)
        self._authenticated: dict[Connection, None] = {}  # the authenticated ranks; guarded by _changed
        self._reported_missing: dict[str, tuple[float, StartupFailure]] = {}  # by phase: when, and who was missing
        self._request = JoinRequest(0, key, job, made_of, nat)
        self._reported_topics: set[str] = set()  # topics that are printed only once
        self._store_announced = self._closing = self._waited_long = False
        allow_many_files(world.world_size)
        fixed = bool(os.environ.get(ports.ENV_PORTS))  # the user's own choice is used as it is
        candidates, warning = (world.master_ports, "") if fixed else ports.outside_ephemeral(world.master_ports)
        if warning:
            say(f"warning: {warning}")
        listener, self.program_port = listen(address, candidates, self._request)
        self.address = self.own_address = str(listener.getsockname()[0])
        self.port = int(listener.getsockname()[1])
        self._store_ports = world.master_ports if fixed else (0,)
        self._connections = Connections(
            listener, self._on_message, self._on_unreadable, self._on_disconnect, world.world_size
        )
        try:
            # Another rank 0 uses a later port if this one was taken when it started. We look only now that we listen
            # ourselves: otherwise two that start at the same moment would wait for each other.
            later = candidates[candidates.index(self.port) + 1 :]
            look_for_another_rank_0(address, later, self._request)
        except BaseException:
            self.close()
            raise

    def report_phase(self, phase: str) -> None:
        with self._changed:
            self.roster.move(self.roster.peers[0], phase)
            self._announce_progress()

    def listen_for_store(self) -> socket.socket:
        """Return a listener for torch's store: at any port, or with comm.ports at a fixed one. Raise BringUpError."""
        refused = []
        for port in self._store_ports:
            try:
                if port in (self.port, self.program_port):
                    raise OSError(errno.EADDRINUSE, "")
                return socket.create_server((self.address, port), family=network.family(self.address), backlog=4096)
            except OSError as error:
                refused.append(f"{port}: {os.strerror(error.errno or 0)}")
        tried = "; ".join(refused)
        raise BringUpError(
            f"rank 0 found no free port for torch's store at {self.address}, tried {tried} (comm.ports; {self.port} is "
            f"that of rank 0, and {self.program_port} is MASTER_PORT): stop what listens there, or add ports",
            quoted=tried,
        )

    def offer_store(self, port: int) -> None:
        """Set the port of torch's store; it is announced when all ranks are ready for it."""
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
            self._on_failure = None
            peer = self.roster.peers[0]
            if not peer.reached("up") and not self._failure:
                peer.error, peer.gone = error[: protocol.LONGEST_ERROR], True
                self._fail(self._first_death())

    def linger_after_failure(self) -> None:
        deadline = time.monotonic() + LATE_S
        with self._changed:
            if not self._failure or self._waited_long or self._all_have_connected():
                return
            say(f"start-up failed; waiting up to {LATE_S:g} s to inform ranks that connect late: {self.failure}")
            while not self._all_have_connected() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _all_have_connected(self) -> bool:
        """Return whether every rank has connected at some time, including those that failed since."""
        return self.roster.all_reached("started")

    def close(self) -> None:
        with self._changed:
            self._close()
        self._connections.join(2)

    def forget(self) -> None:
        for connection in self._authenticated:
            connection.socket.close()
        self._connections.forget()

    def _is_store_announced(self) -> bool:
        return self._store_announced

    def _still_waiting(self, phase: str, left_s: float) -> None:
        say(f"waiting, {left_s:.0f} s left: {self.missing(phase)}")

    def _too_late(self, phase: str) -> StartupFailure:
        with self._changed:
            self._waited_long = True
            self._fail(self._missing(phase))
            assert self._failure is not None
            return self._failure

    def _missing(self, phase: str) -> StartupFailure:
        """Return the failure that names the ranks that have not reached `phase`."""
        rank, host = self.roster.first_missing(phase)
        return StartupFailure(self.missing(phase), failure_kinds.START_UP, rank, host)

    def _first_death(self) -> StartupFailure:
        """Return the failure of the first rank that died; it is false if none did."""
        first = next(iter(self.roster.dead()), None)
        where = (first.rank, first.host) if first else (None, "")
        return StartupFailure(self.roster.lost(), failure_kinds.PEER_LOST, *where)

    # --- in the thread of the connections

    def _on_message(self, connection: Connection, message: dict[str, Any]) -> None:
        """Handle one message of a connection, then announce what follows from it."""
        with self._changed:
            self._handle(connection, message)
            self._announce_progress()

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        """Check the greeting and the proof of a new connection; pass on messages of an authenticated one."""
        if connection.peer is not None:
            self._handle_from_rank(connection, message)
        elif not connection.challenge:
            if message.get("hello") != protocol.GREETING or message.get("job") != self._request.job:
                if str(message.get("hello")).startswith(protocol.PROTOCOL):
                    # So that another version of hpcinit can report what it found.
                    connection.send({"hello": protocol.GREETING})
                raise protocol.NotOurs("another job")
            self._challenge(connection, message)
        else:
            rank = protocol.integer(message, "rank", 0, 2**31)
            at = protocol.endpoint(connection.where, self._request.nat)
            proof = protocol.proof(self._request.key, "peer", connection.challenge, f"{at}|{rank}")
            if not protocol.same(message.get("proof"), proof):
                raise protocol.NotOurs("no proof")
            pid, made_of = protocol.integer(message, "pid", 0, 2**31), message.get("made_of")
            peer = Peer(rank, protocol.text(message, "host", protocol.LONGEST_HOST), pid)
            here = message.get("here")
            ranks_here = [each for each in here if isinstance(each, int)] if isinstance(here, list) else []
            self._register(connection, peer, made_of if isinstance(made_of, dict) else {}, ranks_here)

    def _challenge(self, connection: Connection, message: dict[str, Any]) -> None:
        """Answer the greeting of a connection that is not yet authenticated."""
        key_id = protocol.key_id(self._request.key, self._request.job)
        if message.get("key_id") != key_id:
            self._report_once(
                "another secret",
                f"warning: a process at {connection.remote} tried to connect to rank 0 of this job with another "
                f"secret and was not accepted; if it is one of your ranks: {SAME_SECRET}",
            )
        at, connection.challenge = protocol.endpoint(connection.where, self._request.nat), protocol.challenge()
        proof = protocol.proof(
            self._request.key, "server", protocol.text(message, "challenge", 100), f"{at}|{self._request.job}"
        )
        mine = {"proof": proof, "challenge": connection.challenge, "at": at, "key_id": key_id}
        connection.send({"hello": protocol.GREETING, **mine, **protocol.stamp(connection.received_at)})

    def _handle_from_rank(self, connection: Connection, message: dict[str, Any]) -> None:
        """Use the fields of a message from an authenticated rank; print a warning about unreadable ones."""
        peer = connection.peer
        assert peer is not None
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
                f"warning: ignoring an unreadable message of rank {peer.rank} on {peer.host}: {error}; {SAME_VERSION}",
            )
        if "error" in message and not peer.reached("up"):
            self._mark_dead(peer)
        connection.said_goodbye |= "bye" in message

    def _report_once(self, topic: str, text: str) -> None:
        """Print the text, unless one about the same topic was printed before."""
        if topic not in self._reported_topics:
            self._reported_topics.add(topic)
            say(text)

    def _register(self, connection: Connection, peer: Peer, made_of: dict[str, Any], ranks_here: Sequence[int]) -> None:
        """Accept an authenticated rank, or refuse it and raise NotOurs. A rank that failed may be replaced."""
        before = self.roster.peers.get(peer.rank)
        if not 0 <= peer.rank < self.roster.world_size:
            refusal = f"rank {peer.rank} is not one of the {self.roster.world_size} ranks of this job"
        elif before and (peer.rank == 0 or not before.gone):
            refusal = (
                f"two processes claim rank {peer.rank}: pid {before.pid} on {before.host}, which was first, and pid "
                f"{peer.pid} on {peer.host}; unset RANK and SLURM_PROCID if they are left from an earlier job"
            )
        else:
            refusal = ""
        if refusal:
            say(f"refused: {refusal}")
            connection.send({"refused": refusal})
            raise protocol.NotOurs(refusal)
        connection.peer = peer
        self.roster.enter(peer, ranks_here)
        self._authenticated[connection] = None
        connection.send({"reply": self.program_port, **protocol.stamp(connection.received_at)})
        if self._failure:
            connection.send(self._failure.fields("failed"))
        if different := protocol.differences(self._request.made_of, made_of):
            listed = ", ".join(different)[: protocol.LONGEST_ERROR]
            text = f"rank {peer.rank} on {peer.host} runs a different environment: {listed}"
            self._fail(StartupFailure(text, failure_kinds.PROGRAM, peer.rank, peer.host))

    def _announce_progress(self) -> None:
        """Announce what follows from a change. Called under the lock."""
        if not self._all_connected and self.roster.all_reached("started"):
            self._all_connected = True
            threading.Thread(target=nonce.remove, name="hpcinit-all", daemon=True).start()
            self._send_all({"all": True})
            self._changed.notify_all()
        if not self._store_announced and self._store_port is not None and self.roster.all_reached("imported"):
            self._store_announced = True
            self._send_all({"store": self._store_port})
            self._changed.notify_all()
        if self.roster.all_reached("up"):
            self._close()

    def _close(self) -> None:
        """Announce that connections end on purpose, and stop. Called under the lock."""
        if not self._closing:
            self._closing = True
            self._send_all({"closed": True})
            self._connections.stop()

    def _on_unreadable(self, connection: Connection, error: Exception) -> None:
        """Record that the connection sent data that is not a message; it is disconnected next."""
        if connection.peer is not None and isinstance(error, protocol.NotOurs):
            connection.peer.error = (
                connection.peer.error or f"it sent data that is not a message: {error}; {SAME_VERSION}"
            )

    def _fail(self, reason: StartupFailure) -> None:
        """Report the first failure to all ranks; later ones are consequences. Called under the lock."""
        if not self._failure:
            self._failure = reason
            self._send_all(reason.fields("failed"))
            self._changed.notify_all()
            if self._on_failure:
                self._on_failure(reason.message)

    def _on_disconnect(self, connection: Connection) -> None:
        """Close the socket; a rank that had not finished start-up counts as dead."""
        with self._changed:
            connection.socket.close()
            peer = connection.peer
            if peer is None:
                return
            del self._authenticated[connection]
            if connection.said_goodbye or peer.reached("up"):
                return
            self._mark_dead(peer)

    def _mark_dead(self, peer: Peer) -> None:
        peer.gone = True
        if not self._failure:  # otherwise the others leave too, and the first one is already reported
            self._fail(self._first_death())

    def _recently_missing(self, phase: str) -> StartupFailure:
        """Return who is missing, computed at most once a second: at the deadline every rank asks for it."""
        at, missing = self._reported_missing.get(phase, (-math.inf, None))
        if missing is None or time.monotonic() - at > 1:
            missing = self._missing(phase)
            self._reported_missing[phase] = (time.monotonic(), missing)
        return missing

    def _send_all(self, message: dict[str, Any]) -> None:
        line = protocol.encode(message)
        for connection in self._authenticated:
            connection.send_line(line)
