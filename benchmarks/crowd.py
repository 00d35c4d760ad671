"""Simulate very many ranks except rank 0 in one process, each with its own connections and the messages of a real rank.

    python -m benchmarks.crowd      (benchmarks.store starts it, and sends its task on stdin)

hpcinit's own functions create the messages of the rendezvous, and a rank without a reply reconnects as a real one does.
The messages for torch's store were recorded from a TCPStore of torch 2.13. Rank 0 uses real torch, so a wrong message
would block it.
"""

from __future__ import annotations

import errno
import heapq
import json
import os
import random
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from hpcinit.rendezvous import protocol, rendezvous_client, server

HERE = "127.0.0.1"
MADE_OF = {"python": "3.11.7", "hpcinit": "0.1.0", "torch": "2.13.0", "commit": "0" * 40, "run": "/runs/train-0001"}
KEY, JOB = "key", "77.0.0#0"

# Protocol of torch's store, version 2.13: one byte for the query, and strings after their length in 8 bytes.
SET, ADD, WAIT = b"\x01", b"\x04", b"\x06"
HELLO = (
    b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + struct.pack("<I", 42)
)  # VALIDATE with its magic number, PING with 42
BARRIER = "store_based_barrier_key:bench"


class Connect(NamedTuple):
    port: int


class Line(NamedTuple):
    """Wait for the next line of JSON, until a time of the monotonic clock, or forever."""

    until: float = 0.0


class Bytes(NamedTuple):
    """Wait for `count` bytes."""

    count: int


class Until(NamedTuple):
    """Wait for a time of the monotonic clock."""

    event: float


class NoReply(Exception):
    """Rank 0 closed the connection or did not reply in time. Raised where a rank waits."""


Talk = Generator[Connect | Line | Bytes | Until | bytes, Any, None]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def to_rank_0(task: dict[str, Any], rank: int, mark: Callable[[str], None]) -> Talk:
    """Connect as RendezvousClient does: without a reply, reconnect after a pause and wait longer."""
    patience_s, pause_s = rendezvous_client.CONNECT_S, rendezvous_client.FIRST_PAUSE_S
    longest_s = rendezvous_client.LAST_PAUSE_S * max(1.0, task["world_size"] / rendezvous_client.CONNECTING_RANKS)
    while True:
        try:
            yield from _handshake(task["port"], rank, time.monotonic() + patience_s)
            break
        except NoReply:
            patience_s = min(rendezvous_client.LONGEST_SILENCE_S, 2 * patience_s)
            yield Until(time.monotonic() + pause_s * random.uniform(0.5, 1.5))
            pause_s = min(longest_s, pause_s * 1.5)
    mark("joined")


def _handshake(port: int, rank: int, until: float) -> Talk:
    yield Connect(port)
    mine = protocol.challenge()
    yield protocol.encode({"hello": protocol.GREETING, "job": JOB, "challenge": mine})
    answer = yield Line(until)
    assert protocol.same(answer["proof"], protocol.proof(KEY, "server", mine, JOB))
    proof = protocol.proof(KEY, "peer", answer["challenge"], str(rank))
    yield protocol.encode({"rank": rank, "proof": proof, "made_of": MADE_OF, **protocol.identity()})
    answer = yield Line()
    assert "reply" in answer, answer


def rendezvous(task: dict[str, Any], rank: int, mark: Callable[[str], None]) -> Talk:
    """Join, wait for all ranks and the port of the store, connect to it if `store` is true, and report `up`."""
    yield Until(task["begin"] + rendezvous_client.spread_s(task["world_size"]))
    yield from to_rank_0(task, rank, mark)
    yield protocol.encode({"phase": "imported"})
    message: dict[str, Any] = {}
    while "store" not in message:
        message = yield Line()
    mark("barrier")
    if task["store"]:
        yield Until(time.monotonic() + rendezvous_client.spread_s(task["world_size"]))
        yield Connect(message["store"])
        yield HELLO
        yield Bytes(4)
        mark("store")
        yield Connect(0)  # back to rank 0
    yield protocol.encode({"phase": "joined"})
    yield protocol.encode({"phase": "up"})
    while "closed" not in message:
        message = yield Line()
    mark("up")


def missing(task: dict[str, Any], rank: int, mark: Callable[[str], None]) -> Talk:
    """Join, and query at the deadline which ranks have not."""
    yield Until(task["begin"] + rendezvous_client.spread_s(task["world_size"]))
    yield from to_rank_0(task, rank, mark)
    yield Until(task["deadline"])
    yield protocol.encode({"who": "started"})
    message: dict[str, Any] = {}
    while "missing" not in message:
        message = yield Line()
    assert "never connected" in message["missing"]
    mark("reported")


def plain(task: dict[str, Any], rank: int, mark: Callable[[str], None]) -> Talk:
    """Do the same as TCPStore(world_size=N) and c10d's _store_based_barrier of torch 2.13."""
    yield Connect(task["port"])
    yield HELLO
    yield Bytes(4)
    yield ADD + text("init/") + struct.pack("<q", 1)
    yield Bytes(8)
    mark("joined")
    for delta in (1, 0):
        yield ADD + text("/" + BARRIER) + struct.pack("<q", delta)
        count = yield Bytes(8)
    if struct.unpack("<q", count)[0] == task["world_size"]:
        yield SET + text(f"/{BARRIER}:last_worker") + text("1")
    yield WAIT + struct.pack("<Q", 1) + text(f"/{BARRIER}:last_worker")
    yield Bytes(1)
    mark("up")


WAYS = {"rendezvous": rendezvous, "missing": missing, "plain": plain}


class Client:
    """One rank. sent, received: numbers of messages. steps: how often it was resumed. reconnects: how often it had no
    reply."""

    def __init__(self, number: int, talk: Talk) -> None:
        self.number, self.talk, self.wants = number, talk, None
        self.steps = self.reconnects = 0
        self.sockets: list[socket.socket] = []
        self.socket: socket.socket
        self.lines, self.messages, self.bytes = protocol.Lines(), [], b""
        self.sent = self.received = 0

    def connect(self) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets.append(self.socket)
        self.lines, self.messages, self.bytes = protocol.Lines(), [], b""
        assert isinstance(self.wants, Connect)
        assert self.socket.connect_ex((HERE, self.wants.port)) in {0, errno.EINPROGRESS}

    def answer(self) -> Any:
        """Return what the rank waits for, or None if it has not arrived."""
        if isinstance(self.wants, Line) and self.messages:
            self.received += 1
            return self.messages.pop(0)
        if isinstance(self.wants, Bytes) and len(self.bytes) >= self.wants.count:
            found, self.bytes = self.bytes[: self.wants.count], self.bytes[self.wants.count :]
            self.received += 1
            return found
        return None

    def read(self) -> None:
        data = self.socket.recv(65_536)
        assert b"failed" not in data, data
        if not data:
            raise NoReply(f"rank 0 closed the connection of client {self.number}, which waits for {self.wants}")
        if isinstance(self.wants, Line):
            self.messages += self.lines.feed(data)
        else:
            self.bytes += data


class Crowd:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.sleeping: list[tuple[float, int, int, Client]] = []  # (time, client number, its step, client)
        self.talking = 0

    def run(self, clients: Iterator[Client]) -> None:
        for client in clients:
            self.talking += 1
            self.resume(client, None)
        while self.talking:
            patience = max(0.0, self.sleeping[0][0] - time.monotonic()) if self.sleeping else None
            for key, _ in self.selector.select(patience):
                self.ready(key.data)
            while self.sleeping and self.sleeping[0][0] <= time.monotonic():
                _, _, step, client = heapq.heappop(self.sleeping)
                if step == client.steps:
                    self.resume(client, None) if isinstance(client.wants, Until) else self.give_up(client, "silence")

    def ready(self, client: Client) -> None:
        if isinstance(client.wants, Connect):
            if error := client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.give_up(client, os.strerror(error))
                return
            self.selector.modify(client.socket, selectors.EVENT_READ, client)
            self.resume(client, None)
            return
        try:
            client.read()
        except (NoReply, ConnectionError) as error:
            self.give_up(client, str(error))
            return
        if (answer := client.answer()) is not None:
            self.resume(client, answer)

    def give_up(self, client: Client, why: str) -> None:
        self.selector.unregister(client.socket)
        client.socket.close()
        client.sockets.remove(client.socket)
        client.reconnects += 1
        self.resume(client, NoReply(why))

    def resume(self, client: Client, answer: Any) -> None:
        """Run the client until it has to wait."""
        try:
            while True:
                client.steps += 1
                given, answer = answer, None
                client.wants = client.talk.throw(given) if isinstance(given, NoReply) else client.talk.send(given)
                if isinstance(client.wants, bytes):
                    assert client.socket.send(client.wants) == len(client.wants)
                    client.sent += 1
                elif isinstance(client.wants, Until):
                    heapq.heappush(self.sleeping, (client.wants.event, client.number, client.steps, client))
                    return
                elif isinstance(client.wants, Connect) and client.wants.port == 0:
                    client.socket = client.sockets[0]
                elif isinstance(client.wants, Connect):
                    client.connect()
                    self.selector.register(client.socket, selectors.EVENT_WRITE, client)
                    return
                elif (answer := client.answer()) is None:
                    if isinstance(client.wants, Line) and client.wants.until:
                        heapq.heappush(self.sleeping, (client.wants.until, client.number, client.steps, client))
                    return
        except StopIteration:
            self.talking -= 1
            for each in client.sockets:
                self.selector.unregister(each)


def main() -> None:
    """Read a task as a line of JSON (way, ranks [first, last], port, ...) and print the result as JSON."""
    print("ready", flush=True)
    task = json.loads(sys.stdin.readline())
    first, last = task["ranks"]
    server.allow_many_files(last - first)
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = time.monotonic()  # the time of the last rank

    clients = [Client(rank, WAYS[task["way"]](task, rank, mark)) for rank in range(first, last)]
    time.sleep(max(0.0, task["begin"] - time.monotonic()))
    Crowd().run(iter(clients))
    counts = sorted({(client.sent, client.received) for client in clients})
    print(
        json.dumps(
            {
                "marks": {name: at - task["begin"] for name, at in marks.items()},
                "messages": counts,
                "reconnects": sum(client.reconnects for client in clients),
            }
        ),
        flush=True,
    )
    sys.stdin.readline()  # rank 0 has finished


if __name__ == "__main__":
    main()
