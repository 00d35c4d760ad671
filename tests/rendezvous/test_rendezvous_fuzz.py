"""Malformed messages on both sides of the rendezvous: before authentication they are ignored, and after it no rank fails.

HPCINIT_FUZZ=10000 sets the number of messages of each test; docs/development/measurements.md has the result of such a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import string
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpcinit.base.errors import BringUpError
from hpcinit.rendezvous import protocol, rendezvous_client
from hpcinit.rendezvous.rendezvous_client import JoinRequest
from hpcinit.world import World
from tests.rendezvous.test_rendezvous import (
    HERE,
    MADE_OF,
    foreign_server,
    free_ports,
    in_threads,
    open_client,
    open_server,
)

MESSAGES = int(os.environ.get("HPCINIT_FUZZ", "1000"))
KEYS = [
    "hello",
    "job",
    "challenge",
    "proof",
    "clock",
    "rank",
    "host",
    "pid",
    "made_of",
    "phase",
    "error",
    "who",
    "bye",
    "reply",
    "refused",
    "failed",
    "all",
    "store",
    "missing",
    "closed",
    "key_id",
]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 65_536, 2**63, -(2**64), 10**400, 0.5, 1e308, "", "\ud800", "\udfff\ud800", "\x00", "\x1b]0;title\x07",
    "x" * 5000, "started", "up", "nosuchphase", [], {}, [1], [1, 2], [True, False], [10**400, 10**400], ["a", "b"], [None, None],
    {"": ""}, {"torch": 3}, {"torch": "9"}, {"\ud800": "\ud800"}, [[[[]]]], "NaN",
]  # fmt: skip
RAW = [
    b"", b"\n", b"\n\n\n", b"NaN\n", b'{"clock": [NaN, Infinity]}\n', b'{"clock": [1e999, -1e999]}\n', b'{"store": Infinity}\n',
    b'{"a": 1, "a": 2}\n', b'{"store": 1, "store": "x"}\n', b"[" * 60_000 + b"\n", b'{"a":' * 9_000 + b"\n", b"{" * 70_000,
    b'{"store": ' + b"9" * 400 + b"}\n", b'{"store": ' + b"9" * 5_000 + b"}\n", b"\xff\xfe{}\n", b"\x00" * 70_000, b'"text"\n', b"[1]\n", b"{1: 2}\n",
    b'{"failed": "\\ud800"}\n', b"\xef\xbb\xbf{}\n", b"GET / HTTP/1.0\r\n\r\n",
]  # fmt: skip


@pytest.fixture(autouse=True)
def every_number_of_digits() -> Iterator[None]:
    """Remove Python's limit for the digits of a number: some messages have more."""
    if not hasattr(sys, "set_int_max_str_digits"):
        yield
        return
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


@pytest.fixture
def world() -> World:
    return World("slurm", 0, 3, 0, 1, 0, ("a", "b", "c"), HERE, free_ports(4), "77.0.0")


def value(chance: random.Random) -> Any:
    if chance.random() < 0.2:
        return "".join(chance.choices(string.printable, k=chance.randrange(80)))
    return chance.choice(ODD)


def message(chance: random.Random, valid: dict[str, Any], keep: tuple[str, ...] = ()) -> bytes:
    """Return `valid` with some values changed, removed or added, except those of `keep`; or a line without a message."""
    if not keep and chance.random() < 0.1:
        return chance.choice(RAW)
    changed = dict(valid)
    for key in chance.sample(KEYS, chance.randrange(1, 5)):
        if key not in keep:
            changed[key] = value(chance)
    for key in list(changed):
        if key not in keep and chance.random() < 0.1:
            del changed[key]
    line = json.dumps(changed).encode()
    if not keep and chance.random() < 0.1:
        line = line[: chance.randrange(len(line))]
    return line + b"\n"


def test_a_server_that_sends_anything_is_not_ours() -> None:
    """For every answer of a server at a candidate port, a rank treats it as another program and never crashes."""
    chance = random.Random(12)
    claim = JoinRequest(1, "secret", "j", MADE_OF)
    sent: list[bytes] = [b""]

    def behave(connection: socket.socket) -> None:
        connection.recv(65_536)
        connection.sendall(sent[0])
        connection.close()

    valid = {"hello": protocol.GREETING, "proof": "0" * 64, "challenge": "0" * 32, "clock": [1.0, 2.0]}
    (port,) = free_ports(1)
    with foreign_server(port, behave) as connections:
        for _ in range(MESSAGES):
            sent[0] = message(chance, valid)
            with pytest.raises(protocol.NotOurs):
                rendezvous_client.connect(HERE, port, claim, 2.0)
    assert len(connections) == MESSAGES


@pytest.mark.parametrize("bad", [{"clock": [10**400, 10**400]}, {"proof": "\ud800"}, {"challenge": ["a"]}])
def test_the_proof_is_checked_first(bad: dict[str, Any]) -> None:
    """A reply without a valid proof is not used: a clock of 400 digits or an odd proof makes no rank fail."""
    answer = {"hello": protocol.GREETING, "proof": "0" * 64, "challenge": "0" * 32, "clock": [1.0, 2.0], **bad}
    (port,) = free_ports(1)
    line = json.dumps(answer).encode() + b"\n"
    with foreign_server(port, lambda connection: connection.sendall(line)), pytest.raises(protocol.NotOurs):
        rendezvous_client.connect(HERE, port, JoinRequest(1, "secret", "j", MADE_OF), 2.0)


def test_a_client_that_sends_anything_keeps_no_rank_out(world: World) -> None:
    """All ranks of the job start, whatever unauthenticated connections send to rank 0."""
    chance = random.Random(13)
    host = open_server(world)
    valid = {"hello": protocol.GREETING, "job": "j", "challenge": "0" * 32}
    for _ in range(MESSAGES):
        with socket.create_connection((HERE, host.port)) as connection, contextlib.suppress(OSError):
            connection.sendall(message(chance, valid))
            if chance.random() < 0.5:  # a second message, after rank 0's challenge
                select.select([connection], [], [], 0.2)
                hand = {"rank": 1, "proof": "0" * 64, "made_of": MADE_OF, **protocol.identity()}
                connection.sendall(message(chance, hand))
    assert [open_client(world, rank).failure for rank in (1, 2)] == ["", ""] and host.failure == ""
    assert sorted(host.roster.peers) == [0, 1, 2]


def handshake(host: Any, rank: int, made_of: object = MADE_OF) -> socket.socket:
    """Return a connection of rank `rank`, authenticated with the key 'k'."""
    claim = JoinRequest(rank, "k", "j", MADE_OF)
    welcome = rendezvous_client.connect(HERE, host.port, claim)
    return welcome.socket


def test_odd_messages_of_an_authenticated_rank_end_nothing(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """After authentication rank 0 ignores unreadable fields with one warning, and the start-up continues."""
    chance = random.Random(14)
    host, two = open_server(world), open_client(world, 2)
    keep = ("error", "bye", "hello", "job")
    connection = handshake(host, 1)
    for _ in range(MESSAGES):
        connection.sendall(message(chance, {"phase": "started", "who": "started"}, keep))
        while select.select([connection], [], [], 0)[0]:
            assert connection.recv(1_000_000)
    connection.sendall(protocol.encode({"phase": "imported"}))
    for member in (host, two):
        member.report_phase("imported")
    host.offer_store(4242)
    assert two.wait_for_store(time.monotonic() + 10, 9) == 4242
    assert (host.failure, two.failure) == ("", "")
    assert capfd.readouterr().err.count("rank 1 on ") == 1


def test_what_is_no_message_from_an_authenticated_rank_names_it(world: World) -> None:
    """A rank that sends data which is not a message is reported by name, with the data."""
    host = open_server(world)
    handshake(host, 1).sendall(b"x" * 100_000)
    with pytest.raises(BringUpError, match=r"rank 1 on .* \(pid \d+\) .*a line of more than \d+ bytes"):
        host.wait_for_all(time.monotonic() + 10, 9)


def test_odd_messages_of_rank_0_end_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After authentication a rank ignores unreadable fields, and still gets the store's port."""
    chance = random.Random(15)
    host, one = open_server(world), open_client(world, 1)
    with host._changed:
        (caller,) = host._authenticated
    caller.socket.setblocking(True)
    keep = ("failed", "closed", "hello", "job", "refused", "reply")
    for _ in range(MESSAGES):
        caller.socket.sendall(message(chance, {"all": True, "missing": "x"}, keep))
    caller.socket.sendall(protocol.encode({"store": 4242}))
    deadline = time.monotonic() + 10
    while one._store_port != 4242 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one._store_port == 4242 and one.failure == "" and one._thread.is_alive()


@pytest.mark.parametrize("raw", [b"x" * 100_000, b"not json\n", b"[" * 50_000 + b"\n"])
def test_what_is_no_message_from_rank_0_ends_the_wait(world: World, raw: bytes) -> None:
    """A rank that cannot read rank 0's data fails immediately, with an error that shows the data."""
    host, one = open_server(world), open_client(world, 1)
    with host._changed:
        (caller,) = host._authenticated
    caller.socket.setblocking(True)
    with contextlib.suppress(OSError):
        caller.socket.sendall(raw)
    with pytest.raises(BringUpError, match=r"rank 0 on .* sent data that is not a message of the rendezvous"):
        one.wait_for_all(time.monotonic() + 10, 9)


def test_a_slow_trickle_from_a_server_is_left(world: World) -> None:
    """A server that answers a byte at a time delays a rank no longer than a silent one."""

    def behave(connection: socket.socket) -> None:
        for _ in range(200):
            connection.sendall(b"{")
            time.sleep(0.05)

    with foreign_server(world.master_ports[0], behave):
        began = time.monotonic()
        with pytest.raises(protocol.NotOurs):
            rendezvous_client.connect(HERE, world.master_ports[0], JoinRequest(1, "k", "j", MADE_OF), 0.5)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "stamp", [[10**400, 1], [float("nan"), 1], [float("inf"), 1], [True, False], [1], "x", None, [1e300, 1e300]]
)
def test_a_clock_that_is_none(stamp: object) -> None:
    """A stamp that is not a pair of plausible times changes no offset."""
    offset = protocol.ClockOffset()
    offset.learn(1.0, stamp, 2.0)
    assert offset.known is None


def test_a_fingerprint_of_another_version_names_the_difference(world: World) -> None:
    """A rank whose fingerprint is long or of odd types is reported to all ranks in a readable message."""
    host, one = open_server(world), open_client(world, 1)
    odd: Any = {**MADE_OF, "torch": ["2.13.0"], "x" * 30_000: "y" * 30_000}
    two = open_client(world, 2, made_of=odd)
    later = time.monotonic() + 10
    errors = in_threads(
        *(
            lambda member=member: member.wait_for_all(later, 9) or member.wait_for_store(later, 9)
            for member in (host, one, two)
        )
    )  # type: ignore[misc]
    assert all("rank 2 on" in str(error) and "runs a different environment" in str(error) for error in errors), errors
