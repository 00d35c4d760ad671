"""Very many ranks but rank 0, in one process: each has its own connections and says, byte for byte, what a rank says.

    python -m benchmarks.crowd      (benchmarks.store starts it, and tells it on stdin what to be)

The messages of the rendezvous are made by hpcinit's own functions, and a rank without an answer connects again as a
real one does. Those of torch's store are what a TCPStore of torch 2.13 sends, recorded; rank 0 is torch itself and
counts along: a word that it did not understand would leave it waiting."""

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

from hpcinit.rendezvous import fingerprint, protocol, rendezvous_client, server

HERE = "127.0.0.1"
MADE_OF = {"python": "3.11.7", "hpcinit": "0.1.0", "torch": "2.13.0", "commit": "0" * 40, "run": "/runs/train-0001"}
KEY, JOB = "key", "77.0.0#0"

# torch's store, version 2.13: a byte for the question, strings with their length in 8 bytes before them.
SET, ADD, WAIT = b"\x01", b"\x04", b"\x06"
HELLO = b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + struct.pack("<I", 42)  # VALIDATE its number, PING with 42
BARRIER = "store_based_barrier_key:bench"


class Connect(NamedTuple):
    port: int


class Line(NamedTuple):
    """Wait for the next line of JSON; until a moment of the monotonic clock, for ever without one."""

    until: float = 0.0


class Bytes(NamedTuple):
    """Wait for so many bytes."""

    count: int


class Until(NamedTuple):
    """Wait for a moment of the monotonic clock."""

    event: float


class NoAnswer(Exception):
    """Rank 0 has hung up, or has not said anything in time; thrown at where a rank waits."""


Talk = Generator[Connect | Line | Bytes | Until | bytes, Any, None]


# --- what a rank says


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def to_rank_0(told: dict[str, Any], rank: int, mark: Callable[[str], None]) -> Talk:
    """As RendezvousClient does it: a rank without an answer connects again a moment later, and waits for longer."""
    patience_s, pause_s = rendezvous_client.CONNECT_S, rendezvous_client.FIRST_PAUSE_S
    longest_s = rendezvous_client.LAST_PAUSE_S * max(1.0, told["world_size"] / rendezvous_client.CONNECTING_RANKS)
    while True:
        try:
            yield from _handshake(told["port"], rank, time.monotonic() + patience_s)
            break
        except NoAnswer:
            patience_s = min(rendezvous_client.LONGEST_SILENCE_S, 2 * patience_s)
            yield Until(time.monotonic() + pause_s * random.uniform(0.5, 1.5))
            pause_s = min(longest_s, pause_s * 1.5)
    mark("joined")


def _handshake(port: int, rank: int, until: float) -> Talk:
    yield Connect(port)
    mine = protocol.challenge()
    yield protocol.encode({"hello": protocol.GREETING, "job": JOB, "challenge": mine})
    answer = yield Line(until)
    assert protocol.same(answer["proof"], protocol.proof(KEY, "server", mine, f"{answer['at']}|{JOB}"))
    proof = protocol.proof(KEY, "peer", answer["challenge"], f"{answer['at']}|{rank}")
    yield protocol.encode({"rank": rank, "proof": proof, "made_of": MADE_OF, **fingerprint.identity()})
    answer = yield Line()
    assert "reply" in answer, answer


def meeting(told: dict[str, Any], rank: int, mark: Callable[[str], None]) -> Talk:
    """Join, wait for all, hear of the store; with store=true also reach it; up."""
    yield Until(told["begin"] + rendezvous_client.spread_s(told["world_size"]))
    yield from to_rank_0(told, rank, mark)
    yield protocol.encode({"phase": "imported"})
    message: dict[str, Any] = {}
    while "store" not in message:
        message = yield Line()
    mark("barrier")
    if told["store"]:
        yield Until(time.monotonic() + rendezvous_client.spread_s(told["world_size"]))
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


def missing(told: dict[str, Any], rank: int, mark: Callable[[str], None]) -> Talk:
    """Join, and ask at the deadline who has not."""
    yield Until(told["begin"] + rendezvous_client.spread_s(told["world_size"]))
    yield from to_rank_0(told, rank, mark)
    yield Until(told["deadline"])
    yield protocol.encode({"who": "started"})
    message: dict[str, Any] = {}
    while "missing" not in message:
        message = yield Line()
    assert "never arrived" in message["missing"]
    mark("told")


def plain(told: dict[str, Any], rank: int, mark: Callable[[str], None]) -> Talk:
    """TCPStore(world_size=N) and c10d's _store_based_barrier, as torch 2.13 does them."""
    yield Connect(told["port"])
    yield HELLO
    yield Bytes(4)
    yield ADD + text("init/") + struct.pack("<q", 1)
    yield Bytes(8)
    mark("joined")
    for delta in (1, 0):
        yield ADD + text("/" + BARRIER) + struct.pack("<q", delta)
        count = yield Bytes(8)
    if struct.unpack("<q", count)[0] == told["world_size"]:
        yield SET + text(f"/{BARRIER}:last_worker") + text("1")
    yield WAIT + struct.pack("<Q", 1) + text(f"/{BARRIER}:last_worker")
    yield Bytes(1)
    mark("up")


WAYS = {"meeting": meeting, "missing": missing, "plain": plain}


# --- all of them in one loop


class Client:
    """One rank. said, heard: messages, the handshakes of TCP not counted. steps: how often it went on. again: how often
    it had no answer."""

    def __init__(self, number: int, talk: Talk) -> None:
        self.number, self.talk, self.wants = number, talk, None
        self.steps = self.again = 0
        self.sockets: list[socket.socket] = []
        self.socket: socket.socket
        self.lines, self.messages, self.bytes = protocol.Lines(), [], b""
        self.said = self.heard = 0

    def connect(self) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets.append(self.socket)
        self.lines, self.messages, self.bytes = protocol.Lines(), [], b""
        assert isinstance(self.wants, Connect)
        assert self.socket.connect_ex((HERE, self.wants.port)) in {0, errno.EINPROGRESS}

    def answer(self) -> Any:
        """What was waited for, or None if it is not there yet."""
        if isinstance(self.wants, Line) and self.messages:
            self.heard += 1
            return self.messages.pop(0)
        if isinstance(self.wants, Bytes) and len(self.bytes) >= self.wants.count:
            found, self.bytes = self.bytes[: self.wants.count], self.bytes[self.wants.count :]
            self.heard += 1
            return found
        return None

    def read(self) -> None:
        data = self.socket.recv(65_536)
        assert b"failed" not in data, data
        if not data:
            raise NoAnswer(f"rank 0 hung up on client {self.number}, which waits for {self.wants}")
        if isinstance(self.wants, Line):
            self.messages += self.lines.feed(data)
        else:
            self.bytes += data


class Crowd:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.sleeping: list[tuple[float, int, int, Client]] = []  # until when, whose, at which of its steps
        self.talking = 0

    def run(self, clients: Iterator[Client]) -> None:
        for client in clients:
            self.talking += 1
            self.go_on(client, None)
        while self.talking:
            patience = max(0.0, self.sleeping[0][0] - time.monotonic()) if self.sleeping else None
            for key, _ in self.selector.select(patience):
                self.ready(key.data)
            while self.sleeping and self.sleeping[0][0] <= time.monotonic():
                _, _, step, client = heapq.heappop(self.sleeping)
                if step == client.steps:
                    self.go_on(client, None) if isinstance(client.wants, Until) else self.give_up(client, "silence")

    def ready(self, client: Client) -> None:
        if isinstance(client.wants, Connect):
            if error := client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.give_up(client, os.strerror(error))
                return
            self.selector.modify(client.socket, selectors.EVENT_READ, client)
            self.go_on(client, None)
            return
        try:
            client.read()
        except (NoAnswer, ConnectionError) as error:
            self.give_up(client, str(error))
            return
        if (answer := client.answer()) is not None:
            self.go_on(client, answer)

    def give_up(self, client: Client, why: str) -> None:
        self.selector.unregister(client.socket)
        client.socket.close()
        client.sockets.remove(client.socket)
        client.again += 1
        self.go_on(client, NoAnswer(why))

    def go_on(self, client: Client, answer: Any) -> None:
        """Until it has to wait for something."""
        try:
            while True:
                client.steps += 1
                given, answer = answer, None
                client.wants = client.talk.throw(given) if isinstance(given, NoAnswer) else client.talk.send(given)
                if isinstance(client.wants, bytes):
                    assert client.socket.send(client.wants) == len(client.wants)
                    client.said += 1
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
            for each in client.sockets:  # kept open until all are done: the end of a connection is news to rank 0
                self.selector.unregister(each)


def main() -> None:
    """A line of JSON on stdin: way, ranks [first, last], port, begin, and what the way needs. One on stdout."""
    print("ready", flush=True)
    told = json.loads(sys.stdin.readline())
    first, last = told["ranks"]
    server.allow_many_files(last - first)
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = time.monotonic()  # the last one to come stays

    clients = [Client(rank, WAYS[told["way"]](told, rank, mark)) for rank in range(first, last)]
    time.sleep(max(0.0, told["begin"] - time.monotonic()))
    Crowd().run(iter(clients))
    counts = sorted({(client.said, client.heard) for client in clients})
    print(
        json.dumps(
            {
                "marks": {name: at - told["begin"] for name, at in marks.items()},
                "messages": counts,
                "again": sum(client.again for client in clients),
            }
        ),
        flush=True,
    )
    sys.stdin.readline()  # rank 0 is done


if __name__ == "__main__":
    main()
