"""Rank 0's side: listens, keeps the roster of ranks, and announces torch's store."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcinit.base import errors as kinds
from hpcinit.base import process_limits
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError
from hpcinit.rendezvous import fingerprint, protocol
from hpcinit.rendezvous.connections import Connection, Connections
from hpcinit.rendezvous.rendezvous_client import CONNECT_S, SAME_SECRET, SAME_VERSION, JoinRequest, Refused, connect
from hpcinit.rendezvous.roster import PHASES, Peer, RendezvousEndpoint, Roster
from hpcinit.rendezvous.start_failure import StartupFailure
from hpcinit.world import World, hosts

# Rank 0's ports: the first free candidate for the server, the next for a program's own rendezvous.

LISTEN = "0A"  # the state of a listener in /proc/net/tcp
FILES_BESIDES = 64  # Python's own, and rank 0's streams and sockets


def listen(address: str, candidates: tuple[int, ...], request: JoinRequest) -> tuple[socket.socket, int]:
    """A listener, and the port for the program. Raises BringUpError; Refused if another process is rank 0 already.

    The last candidate is never the server's: a program's rendezvous must have a port too.
    """
    listener, port, refused = _take(address, candidates)
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


def _take(address: str, candidates: tuple[int, ...]) -> tuple[socket.socket | None, int | None, list[str]]:
    """The first free candidate as a listener, the next as a number, and why not the others."""
    listener, refused = None, []
    for port in candidates:
        try:
            found = socket.create_server(
                (address, port), family=protocol.family(address), backlog=4096, reuse_port=False
            )
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
    tried, here = "; ".join(refused), fingerprint.identity()
    if listener is not None:
        return BringUpError(
            f"rank 0 found one free port at {address} and needs two, tried {tried}: end what listens there",
            quoted=tried,
        )
    return BringUpError(
        f"rank 0 (pid {here['pid']} on {here['host']}) cannot listen at {address}, tried ports {tried}: is {address} "
        "an address of this node, and are all these ports taken?",
        quoted=tried,
    )


def look_for_another_rank_0(address: str, ports: Iterable[int], request: JoinRequest) -> None:
    """Raise Refused, with the other's message, if another rank 0 of this start listens on one of `ports`.

    A rank 0 refuses a second one. Who accepts it instead is none, and yet holds the key: raises Refused as well.
    Takes no longer in all than one connection may stay silent.
    """
    until = time.monotonic() + CONNECT_S
    for port in ports:
        with contextlib.suppress(protocol.NotOurs):
            reply = connect(address, port, request, max(0.01, until - time.monotonic()))
            reply.socket.close()
            here = fingerprint.identity()
            raise Refused(
                f"two processes act as rank 0 of this job: pid {here['pid']} on {here['host']}, and a process that "
                f"listens at {hosts.in_url(address, port)}{_owner(port)}, which accepted this one as if it were a rank "
                "of its own: no rank 0 does that. Another user may have found out the secret of this job: "
                f"{SAME_SECRET}"
            )


def _owner(port: int) -> str:
    """', started by user 1000' for who listens at `port` of this node; '' where the kernel does not show it."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for row in Path(table).read_text().splitlines()[1:]:
                words = row.split()  # sl local_address rem_address st ... uid
                if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    return f", started by user {words[7]}"
    return ""


def allow_many_files(ranks: int) -> None:
    """Raise the limit of open files, up to what the administrator allows. Raises BringUpError where that is not enough
    for a connection of each rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < ranks + FILES_BESIDES:
        raise BringUpError(
            f"rank 0 may have {hard} files open on {fingerprint.identity()['host']} (ulimit -Hn), and each of the "
            f"{ranks} ranks comes with two connections: raise the hard limit there to {2 * ranks + 1024} or more"
        )
    process_limits.raise_open_files_limit(ranks)


LATE_S = 15.0  # ranks that come so long after a failure are told of it: Slurm starts its tasks within seconds


class RendezvousServer(RendezvousEndpoint):
    """Listens on `address` in a thread of its own until everybody is up; the thread sleeps while nobody says anything.

    address: where the ranks reach rank 0. key: the secret of this submission. job: names this start.
    made_of: what this rank's fingerprint is. nat: the other nodes reach this one at a translated address.
    when_all: called once, in a thread of its own, when all ranks have connected.
    Raises BringUpError if no candidate port is free, Refused if another process listens for this start already.
    """

    def __init__(
        self,
        world: World,
        address: str,
        key: str,
        job: str,
        made_of: Mapping[str, str],
        nat: bool = False,
        when_all: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._when_all = when_all
        self.clock_offset_s = self.clock_uncertainty_s = 0.0
        self.roster = Roster(world.world_size, world.hosts)
        self.roster.enter(Peer(0, **fingerprint.identity()))
        self._inside: dict[Connection, None] = {}  # the ranks that were let in; changed and walked under _changed
        self._reported_missing: dict[str, tuple[float, StartupFailure]] = {}  # by phase: when, and who was missing
        self._request = JoinRequest(0, key, job, made_of, nat)
        self._reported: set[str] = set()  # what was printed once and is not to be printed again
        self._store_announced = self._closing = self._waited_long = False
        allow_many_files(world.world_size)
        listener, self.program_port = listen(address, world.master_ports, self._request)
        self.address = self.own_address = str(listener.getsockname()[0])
        self.port = int(listener.getsockname()[1])
        self._connections = Connections(
            listener, self._on_message, self._on_unreadable, self._on_disconnect, world.world_size
        )
        try:
            # Another rank 0 has a later port if this one was taken at its time. We look only now that we listen
            # ourselves: two that start at the same moment would each wait for the other.
            later = world.master_ports[world.master_ports.index(self.port) + 1 :]
            look_for_another_rank_0(address, later, self._request)
        except BaseException:
            self.close()
            raise

    def report_phase(self, phase: str) -> None:
        with self._changed:
            self.roster.move(self.roster.peers[0], phase)
            self._react()

    def offer_store(self, port: int) -> None:
        """Where torch's store listens; the ranks hear of it when all of them are ready for it."""
        with self._changed:
            self._store_port = port
            self._react()

    def missing(self, phase: str) -> str:
        with self._changed:
            missing = self.roster.missing(phase)
            if missing and len(self.roster.peers) == 1:
                missing += f"; no rank has connected to rank 0 at {hosts.in_url(self.address, self.port)}"
            return missing

    def fail(self, error: str) -> None:
        with self._changed:
            self._on_failure = None
            peer = self.roster.peers[0]
            if not peer.reached("up") and not self._failure:
                peer.error, peer.gone = error[: protocol.LONGEST_ERROR], True
                self._fail(self._lost())

    def linger_after_failure(self) -> None:
        deadline = time.monotonic() + LATE_S
        with self._changed:
            if not self._failure or self._waited_long or self._all_have_been_here():
                return
            say(f"up to {LATE_S:g} s for those who come now: {self.failure}")
            while not self._all_have_been_here() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _all_have_been_here(self) -> bool:
        return self.roster.all_reached("started")

    def close(self) -> None:
        with self._changed:
            self._close()
        self._connections.join(2)

    def forget(self) -> None:
        for connection in self._inside:
            connection.socket.close()
        self._connections.forget()

    def _is_store_announced(self) -> bool:
        return self._store_announced

    def _still_waiting(self, phase: str) -> None:
        say(f"waiting: {self.missing(phase)}")

    def _too_late(self, phase: str) -> StartupFailure:
        with self._changed:
            self._waited_long = True
            self._fail(self._missing(phase))
            assert self._failure is not None
            return self._failure

    def _missing(self, phase: str) -> StartupFailure:
        rank, host = self.roster.first_missing(phase)
        return StartupFailure(self.missing(phase), kinds.START_UP, rank, host)

    def _lost(self) -> StartupFailure:
        """The first rank that died; false where none did."""
        first = next(iter(self.roster.dead()), None)
        where = (first.rank, first.host) if first else (None, "")
        return StartupFailure(self.roster.lost(), kinds.PEER_LOST, *where)

    # --- in the thread of the connections

    def _on_message(self, connection: Connection, message: dict[str, Any]) -> None:
        with self._changed:
            self._take(connection, message)
            self._react()

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        if connection.peer is not None:
            self._from_peer(connection, message)
        elif not connection.challenge:
            if message.get("hello") != protocol.GREETING or message.get("job") != self._request.job:
                if str(message.get("hello")).startswith(protocol.PROTOCOL):
                    connection.send(
                        {"hello": protocol.GREETING}
                    )  # so that another version of hpcinit can report what it found
                raise protocol.NotOurs("another job")
            self._challenge(connection, message)
        else:
            rank, at = (
                protocol.integer(message, "rank", 0, 2**31),
                protocol.endpoint(connection.where, self._request.nat),
            )
            proof = protocol.proof(self._request.key, "peer", connection.challenge, f"{at}|{rank}")
            if not protocol.same(message.get("proof"), proof):
                raise protocol.NotOurs("no proof")
            pid, made_of = protocol.integer(message, "pid", 0, 2**31), message.get("made_of")
            peer = Peer(rank, protocol.text(message, "host", protocol.LONGEST_HOST), pid)
            self._register(connection, peer, made_of if isinstance(made_of, dict) else {})

    def _challenge(self, connection: Connection, message: dict[str, Any]) -> None:
        """Answer the greeting of a connection that is not authenticated yet."""
        key_id = protocol.key_id(self._request.key, self._request.job)
        if message.get("key_id") != key_id:
            self._report_once(
                "another secret",
                f"warning: a process at {connection.remote} asked for rank 0 of this job with another secret, so it "
                f"stays outside; if it is one of your ranks: {SAME_SECRET}",
            )
        at, connection.challenge = protocol.endpoint(connection.where, self._request.nat), protocol.challenge()
        proof = protocol.proof(
            self._request.key, "server", protocol.text(message, "challenge", 100), f"{at}|{self._request.job}"
        )
        mine = {"proof": proof, "challenge": connection.challenge, "at": at, "key_id": key_id}
        connection.send({"hello": protocol.GREETING, **mine, **protocol.stamp(connection.received_at)})

    def _from_peer(self, connection: Connection, message: dict[str, Any]) -> None:
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
                f"warning: rank {peer.rank} on {peer.host} sent a message that is not understood and is ignored: "
                f"{error}; {SAME_VERSION}",
            )
        if "error" in message and not peer.reached("up"):
            self._mark_dead(peer)
        connection.left |= "bye" in message

    def _report_once(self, topic: str, text: str) -> None:
        if topic not in self._reported:
            self._reported.add(topic)
            say(text)

    def _register(self, connection: Connection, peer: Peer, made_of: dict[str, Any]) -> None:
        before = self.roster.peers.get(peer.rank)
        if not 0 <= peer.rank < self.roster.world_size:
            refusal = f"rank {peer.rank} is not one of the {self.roster.world_size} ranks of this job"
        elif before and (peer.rank == 0 or not before.gone):
            refusal = (
                f"two processes claim rank {peer.rank}: pid {before.pid} on {before.host}, which came first, and pid "
                f"{peer.pid} on {peer.host}; is RANK or SLURM_PROCID left over in one of them?"
            )
        else:
            refusal = ""
        if refusal:
            say(f"refused: {refusal}")
            connection.send({"refused": refusal})
            raise protocol.NotOurs(refusal)
        connection.peer = peer
        self.roster.enter(peer)
        self._inside[connection] = None
        connection.send({"reply": self.program_port, **protocol.stamp(connection.received_at)})
        if self._failure:
            connection.send(self._failure.fields("failed"))
        if different := fingerprint.differences(self._request.made_of, made_of):
            told = ", ".join(different)[: protocol.LONGEST_ERROR]
            text = f"rank {peer.rank} on {peer.host} is not made like rank 0: {told}"
            self._fail(StartupFailure(text, kinds.PROGRAM, peer.rank, peer.host))

    def _react(self) -> None:
        """What follows from what has changed; under the lock."""
        if not self._all_came and self.roster.all_reached("started"):
            self._all_came = True
            threading.Thread(target=self._when_all, name="hpcinit-all", daemon=True).start()
            self._send_all({"all": True})
            self._changed.notify_all()
        if not self._store_announced and self._store_port is not None and self.roster.all_reached("imported"):
            self._store_announced = True
            self._send_all({"store": self._store_port})
            self._changed.notify_all()
        if self.roster.all_reached("up"):
            self._close()

    def _close(self) -> None:
        """Say that the end of the connections is none of a rank; under the lock."""
        if not self._closing:
            self._closing = True
            self._send_all({"closed": True})
            self._connections.stop()

    def _on_unreadable(self, connection: Connection, error: Exception) -> None:
        """A connection sent what is no message; it is lost next."""
        if connection.peer is not None and isinstance(error, protocol.NotOurs):
            connection.peer.error = (
                connection.peer.error or f"it sent something that is no message: {error}; {SAME_VERSION}"
            )

    def _fail(self, reason: StartupFailure) -> None:
        if not self._failure:
            self._failure = reason
            self._send_all(reason.fields("failed"))
            self._changed.notify_all()
            if self._on_failure:
                self._on_failure(reason.message)

    def _on_disconnect(self, connection: Connection) -> None:
        with self._changed:
            connection.socket.close()
            peer = connection.peer
            if peer is None:
                return
            del self._inside[connection]
            if connection.left or peer.reached("up"):
                return
            self._mark_dead(peer)

    def _mark_dead(self, peer: Peer) -> None:
        peer.gone = True
        if not self._failure:  # else all others leave too, and who was first is told already
            self._fail(self._lost())

    def _recently_missing(self, phase: str) -> StartupFailure:
        """At the deadline every rank asks, and the answer takes a walk over all ranks: one walk a second is enough."""
        at, told = self._reported_missing.get(phase, (-math.inf, None))
        if told is None or time.monotonic() - at > 1:
            rank, host = self.roster.first_missing(phase)
            told = StartupFailure(self.roster.missing(phase), kinds.START_UP, rank, host)
            self._reported_missing[phase] = (time.monotonic(), told)
        return told

    def _send_all(self, message: dict[str, Any]) -> None:
        line = protocol.encode(message)
        for connection in self._inside:
            connection.send_line(line)
