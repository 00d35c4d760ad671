"""Connects the fork servers to the first node's server, for restart.warm. It uses no threads, because a server forks.

The servers find each other in hpcinit's rendezvous, which ends before the first fork. After that, each server has one
connection to the first server, on which both ends send messages in the protocol of the rendezvous. The first server
decides when ranks restart (decider.py).
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpcinit.base import signals
from hpcinit.base.errors import BringUpError
from hpcinit.records import elastic_restarts
from hpcinit.records.spec import Spec
from hpcinit.records.startup_timeout import left_of_job
from hpcinit.rendezvous import join, protocol
from hpcinit.rendezvous.rendezvous_client import CONNECT_S, JoinRequest, connect
from hpcinit.world import World, ports

Message = dict[str, Any]
# A node without network or power does not close its connection. The kernel reports it as lost after SILENT_S seconds.
# If no spare node can replace the node, the kernel waits for PATIENT_S seconds instead: the network may recover, and a
# requeue takes longer. The node itself notices the silence EARLIER_S seconds before the first server does, and ends its
# ranks before their replacements start. The timers of the two ends differ by up to IDLE_S.
SILENT_S, PATIENT_S, EARLIER_S = 20, 120, 6
IDLE_S, PROBE_S = 5, 2
REACH_S = 2.0  # how long to wait for a node that may have no network
LOST: Message = {"lost": True}  # what receive() returns for a connection that has ended


class Connection:
    """A connection to another server. It never blocks, because messages are short and fit into the kernel's buffer.

    earlier_s: report_silence_after() subtracts this, so that this end notices a lost network before the other end does.
    """

    def __init__(self, own: socket.socket, lines: protocol.Lines, earlier_s: int = 0) -> None:
        self._socket, self._lines, self._open, self._earlier_s = own, lines, True, earlier_s
        self._peer = own.getpeername()[:2]
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.report_silence_after(SILENT_S)

    def report_silence_after(self, seconds: int) -> None:
        """Set the number of seconds without an answer after which the peer counts as lost."""
        seconds -= self._earlier_s
        probes = (seconds - IDLE_S) // PROBE_S
        options = {"KEEPIDLE": IDLE_S, "KEEPINTVL": PROBE_S, "KEEPCNT": probes, "USER_TIMEOUT": 1000 * seconds}
        for name, value in options.items() if self._open else ():
            self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)

    def files(self) -> list[int]:
        return [self._socket.fileno()] if self._open else []

    def send(self, message: Message) -> None:
        with suppress(OSError):  # receive() reports the error
            self._socket.sendall(protocol.encode(message))

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. If the connection has ended, return LOST as the last message, once."""
        try:
            data = self._socket.recv(65_536) if self._open else None
            if data is None:
                return []
            if data:
                return self._lines.feed(data)
        except BlockingIOError:
            return []
        except (OSError, protocol.NotOurs):
            pass
        self.close()
        return [LOST]

    def close(self) -> None:
        self._open = False
        self._socket.close()

    def is_peer_reachable(self) -> bool:
        """Return whether the peer's node responds now, that is, accepts or refuses a connection at the peer's port."""
        try:
            socket.create_connection(self._peer, timeout=REACH_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True


class Link:
    """The connections of this server.

    The first server has a connection to each other server. Each other server has only a connection to the first one.

    decide: on the first server, a function that takes a node's number and its message, and returns orders for all
        servers. On other servers, None.
    """

    def __init__(
        self, connections: Mapping[int, Connection], decide: Callable[[int, Message], Iterable[Message]] | None = None
    ) -> None:
        self._connections, self._decide = connections, decide
        self._orders: list[Message] = []  # orders of the first server to itself

    def wait(self, received: signals.Descriptor, timeout_s: float) -> int | None:
        """Wait for a signal and return it. Return None after the timeout, or if a message may have arrived."""
        files = [file for connection in self._connections.values() for file in connection.files()]
        return received.wait(0.0 if self._orders else timeout_s, files)

    def send(self, message: Message) -> None:
        """Send a message to the first server."""
        if self._decide is None:
            self._connections[0].send(message)
        else:
            self._take(0, message)

    def receive(self) -> Sequence[Message]:
        """Return the orders from the first server, and LOST if the connection to it has ended."""
        if self._decide is None:
            return self._connections[0].receive()
        for node, connection in self._connections.items():
            for message in connection.receive():
                self._take(node, message)
        self._take(0, {})
        orders, self._orders = self._orders, []
        return orders

    def report_silence_after(self, seconds: int) -> None:
        """Set the number of seconds without an answer after which a server counts as lost."""
        for connection in self._connections.values():
            connection.report_silence_after(seconds)

    def is_first_reachable(self) -> bool:
        return self._decide is not None or self._connections[0].is_peer_reachable()

    def close(self) -> None:
        """Close this process's connections. A forked rank calls this too, because it has copies of them."""
        for connection in self._connections.values():
            connection.close()

    def _take(self, node: int, message: Message) -> None:
        assert self._decide is not None
        for order in self._decide(node, message):
            self._orders.append(order)
            for connection in self._connections.values():
                connection.send(order)


def connect_servers(spec: Spec, servers: World) -> dict[int, Connection]:
    """Wait until all fork servers have started. Return this server's connections, each with the number of its node.

    Call this before the first fork, because it uses threads until it returns. Raise BringUpError if a server is
    missing.

    servers: the World of the fork servers, in which each server is a rank.
    """
    if servers.world_size == 1:
        return {}
    # Use another job name, and so other ports, than the ranks, which use the same host a moment later.
    job = elastic_restarts.agents_folder(servers.job)
    servers = replace(servers, job=job, master_ports=ports.of_job(os.environ, job))
    timeout = spec.comm.timeout.start_up(spec.nodes, left_of_job(os.environ, time.time()))
    deadline = time.monotonic() + timeout.total_seconds()
    rendezvous = join.join(servers, spec, timeout, 0)
    # A different key, so that these connections can't be mistaken for those of the rendezvous.
    key = hashlib.sha256(f"{spec.nonce}|fork servers|{job}".encode()).hexdigest()
    try:
        rendezvous.report_phase("imported")
        if servers.rank == 0:
            with rendezvous.listen_for_store() as listener:  # type: ignore[attr-defined]  # rank 0 has a server
                rendezvous.offer_store(listener.getsockname()[1])  # type: ignore[attr-defined]
                found = _accept(listener, servers, key, deadline)
        else:
            port = rendezvous.wait_for_store(deadline, join.report_interval_s(servers))
            reply = connect(rendezvous.address, port, JoinRequest(servers.rank, key, job, {}), CONNECT_S, deadline)
            found = {0: Connection(reply.socket, reply.lines, EARLIER_S)}
    except (OSError, protocol.NotOurs) as error:
        raise BringUpError(f"restart.warm: the fork servers cannot connect to each other: {error}") from None
    finally:
        rendezvous.close()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(CONNECT_S)
    return found


def _accept(listener: socket.socket, servers: World, key: str, deadline: float) -> dict[int, Connection]:
    """Accept connections until all other servers have connected. Return them, each with the number of its node.

    Raise BringUpError at the deadline, which is a time of time.monotonic().
    """
    found: dict[int, Connection] = {}
    while len(found) < servers.world_size - 1:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            missing = [servers.hosts[node] for node in range(1, servers.world_size) if node not in found]
            raise BringUpError(f"restart.warm: no fork server connected from {', '.join(missing)}") from None
        lines = protocol.Lines()
        try:
            node = _check(accepted, lines, servers, key)
            found[node] = Connection(accepted, lines)
        except (OSError, EOFError, protocol.NotOurs):  # another program, which cannot prove that it has the key
            accepted.close()
    return found


def _check(accepted: socket.socket, lines: protocol.Lines, servers: World, key: str) -> int:
    """Return the node of the server that has connected. Raise NotOurs if it cannot prove that it has the key."""
    until = time.monotonic() + CONNECT_S
    theirs, mine = protocol.text(protocol.receive(accepted, lines, until)[0], "challenge", 100), protocol.challenge()
    proof = protocol.proof(key, "server", theirs, servers.job)
    accepted.sendall(protocol.encode({"hello": protocol.GREETING, "proof": proof, "challenge": mine}))
    hand = protocol.receive(accepted, lines, until)[0]
    node = protocol.integer(hand, "rank", 1, servers.world_size - 1)
    if not protocol.same(hand.get("proof"), protocol.proof(key, "peer", mine, str(node))):
        raise protocol.NotOurs("no proof")
    accepted.sendall(protocol.encode({"reply": 1}))
    return node
