"""What a meeting of very many ranks must not do, shown with few; with thousands: benchmarks/store.py."""

from __future__ import annotations

import json
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hpcinit.base.errors import BringUpError
from hpcinit.rendezvous import connections, protocol, rendezvous_client, server
from hpcinit.rendezvous.connections import Connection
from hpcinit.rendezvous.rendezvous_client import spread_s
from hpcinit.rendezvous.roster import PHASES, Peer, Roster
from hpcinit.world import World
from tests.rendezvous.test_rendezvous import HERE, STRANGERS, door, free_ports, stranger, visit

SKEWED_GUEST = """
import json, sys, time
true = time.time
time.time = lambda: true() - float(sys.argv[2])
from tests.rendezvous.test_rendezvous import World, visit
world = World("slurm", 0, 2, 0, 1, 0, ("a", "b"), "127.0.0.1", (int(sys.argv[1]),), "77.0.0")
one = visit(world, 1, within_s=60)
print(json.dumps([one.clock_offset_s, one.clock_uncertainty_s]))
"""


@pytest.fixture
def world() -> World:
    """Rank 0 of 3 on three nodes, with ports of its own."""
    return World("slurm", 0, 3, 0, 1, 0, ("a", "b", "c"), HERE, free_ports(4), "77.0.0")


@pytest.mark.parametrize("behind_s", [0.0, 100.0, -7.5])
def test_a_rank_learns_how_far_ahead_rank_0s_clock_is(world: World, behind_s: float) -> None:
    """A rank on a node whose clock is wrong learns by how much as it joins, within the uncertainty that it tells."""
    host = door(world)
    words = [sys.executable, "-c", SKEWED_GUEST, str(host.port), str(behind_s)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    offset_s, uncertainty_s = json.loads(done.stdout)
    assert 0 <= uncertainty_s < 5
    assert abs(offset_s - behind_s) <= uncertainty_s + 0.01  # the test's own two clocks are one
    assert (host.clock_offset_s, host.clock_uncertainty_s) == (0, 0)


def test_the_offset_is_bounded_from_both_sides() -> None:
    """The tightest bound of each direction counts, one direction alone tells nothing, and what is no stamp is ignored."""
    offset = protocol.ClockOffset()
    offset.learn(None, [110.0, 110.0], 10.5)  # read at 10.5 what was said at 110: at least 99.5 ahead
    assert offset.known is None
    offset.learn(10.0, [111.0, 111.2], 11.0)  # heard at 111 what was sent at 10: at most 101; and at least 100.2
    assert offset.known == pytest.approx((100.6, 0.4))
    for nothing in (None, [], ["1", 2], 5, [1.0]):
        offset.learn(10.0, nothing, 11.0)
    assert offset.known == pytest.approx((100.6, 0.4))


def test_joining_takes_the_same_messages_however_many_ranks_there_are(world: World) -> None:
    """A rank that joins sends two messages and gets two, with its clock's offset and the identity check in them."""
    heard: list[dict[str, object]] = []
    said: list[dict[str, object]] = []
    host = door(world)
    hear, send = host._connections._on_message, Connection.send
    host._connections._on_message = lambda caller, message: (heard.append(message), hear(caller, message))[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", lambda caller, message: (said.append(message), send(caller, message))[1])
        assert visit(world, 1).clock_offset_s is not None
    assert [sorted({"hello", "rank"} & set(message)) for message in heard] == [["hello"], ["rank"]]
    assert [sorted({"hello", "reply"} & set(message)) for message in said] == [["hello"], ["reply"]]


def test_what_is_counted_is_what_a_walk_finds() -> None:
    """However ranks come, go on, fall back and come again, the counts say what looking at each of them says."""
    chance, roster = random.Random(0), Roster(6, [])
    for _ in range(3000):
        rank = chance.randrange(6)
        if rank not in roster.peers or chance.random() < 0.1:
            roster.enter(Peer(rank, "h", 1))
        else:
            roster.move(roster.peers[rank], chance.choice(PHASES))
        for phase in PHASES:
            walked = len(roster.peers) == 6 and all(peer.reached(phase) for peer in roster.peers.values())
            assert roster.all_reached(phase) == walked
    with pytest.raises(ValueError, match="not in tuple"):
        roster.move(roster.peers[0], "asleep")


def test_all_who_ask_at_the_deadline_are_told_from_one_walk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank asks who is missing at its deadline: rank 0 looks once a second, not once for each."""
    host, one, two = door(world), visit(world, 1), visit(world, 2)
    walks: list[str] = []
    missing = host.roster.missing
    monkeypatch.setattr(host.roster, "missing", lambda phase: (walks.append(phase), missing(phase))[1])
    told = [each.missing("imported") for each in (one, two, one, two)]
    assert all("3 of 3 ranks are missing" in text for text in told) and walks == ["imported"]


def test_a_door_behind_a_crowd_is_listened_to_for_longer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a port that was silent a rank listens twice as long at its next visit: at our door it would be in a crowd."""
    monkeypatch.setattr(rendezvous_client, "CONNECT_S", 0.1)
    given: list[float] = []
    knock = rendezvous_client.connect

    def noted(
        address: str, port: int, claim: rendezvous_client.JoinRequest, patience_s: float, deadline: float
    ) -> object:
        if port == world.master_ports[0]:
            given.append(patience_s)
        return knock(address, port, claim, patience_s, deadline)

    monkeypatch.setattr(rendezvous_client, "connect", noted)
    with stranger(world.master_ports[0], STRANGERS["silent"]), pytest.raises(BringUpError, match="says nothing"):
        visit(world, 1, within_s=3)
    assert given[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])


def test_a_stranger_is_shown_out_though_guests_are_let_in(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says nothing is shown out after its time, whoever came and went meanwhile; ranks stay."""
    monkeypatch.setattr("hpcinit.rendezvous.connections.UNAUTHENTICATED_S", 1.0)
    host = door(world)
    with socket.create_connection((HERE, host.port)) as silent:
        one = visit(world, 1)
        silent.settimeout(30)
        began = time.monotonic()
        assert silent.recv(10) == b""
        assert time.monotonic() - began < 20
    assert one.failure == host.failure == "" and not host._connections._unauthenticated


def test_too_few_files_for_the_ranks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 may not open a connection for each rank, it says so before it opens the door, with the number."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(BringUpError, match=r"4096 files open .* each of the 16384 ranks .* to 33792 or more"):
        server.allow_many_files(16_384)


def test_files_for_the_door_and_for_torchs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 raises its limit before it listens, for more than two connections of each rank, up to the hard limit."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for hard in (100_000, 30_000):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (1024, hard))
        server.allow_many_files(16_384)
    assert asked == [(100_000, 100_000), (30_000, 30_000)]


def test_no_files_left_at_the_door(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """A door that may open no more files says so once, does not spin, and lets the others in when there are some."""
    host = door(world)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket()
    lowest = waiting.fileno()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        waiting.connect((HERE, host.port))
        until = time.monotonic() + 30
        said = ""
        while "too many open files" not in said and time.monotonic() < until:
            time.sleep(0.05)
            said += capfd.readouterr().err
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.25
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        waiting.close()
    assert said.count("rank 0 cannot take more connections") == 1
    assert visit(world, 1, within_s=30).failure == "" and capfd.readouterr().err == ""


@pytest.fixture
def as_python_begins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Doors that other tests have left open do not count."""
    monkeypatch.setattr(connections, "_servers", 0)
    found = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(found)


@pytest.mark.usefixtures("as_python_begins")
def test_the_door_has_its_turn_while_rank_0_computes(world: World) -> None:
    """While a door is open Python switches threads quickly, and as before when the last one is closed."""
    first, second = door(world), door(world, key="second", job="second")
    assert sys.getswitchinterval() == pytest.approx(connections.QUICK_S)
    first.close()
    assert sys.getswitchinterval() == pytest.approx(connections.QUICK_S)
    second.close()
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.usefixtures("as_python_begins")
def test_a_programs_own_switch_interval_stays(world: World) -> None:
    """A program that sets Python's interval while the door is open keeps it."""
    host = door(world)
    sys.setswitchinterval(0.01)
    host.close()
    assert sys.getswitchinterval() == pytest.approx(0.01)


def test_a_broadcast_is_encoded_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all ranks are told becomes a line once, not once for each."""
    host = door(world)
    peers = [visit(world, rank) for rank in (1, 2)]
    encoded: list[dict[str, object]] = []
    encode = protocol.encode
    monkeypatch.setattr(protocol, "encode", lambda message: (encoded.append(message), encode(message))[1])
    host.fail("no such script")
    # Rank 0 may still tell the ranks that all of them have come.
    assert [message["failed"] for message in encoded if "failed" in message] == [host.failure]
    for peer in peers:
        with pytest.raises(BringUpError, match="no such script"):
            peer.wait_for_store(time.monotonic() + 30, 10)


def test_thousands_that_never_came_fit_into_a_line(world: World) -> None:
    """However many ranks and nodes are missing, every rank is told in a line that it takes: folded, and cut where need be."""
    hosts = tuple(f"node{number:05}" for number in range(16_384))
    every = Roster(16_384, hosts).missing("started")
    assert "ranks 0-16383 never arrived (nobody came from node[00000-16383])" in every
    odd = Roster(16_384, hosts)
    for rank in range(0, 16_384, 2):
        odd.enter(Peer(rank, hosts[rank], 1))
    told = odd.missing("started")
    assert (
        len(told) < 5_000 and "8192 of 16384 ranks are missing: ranks 1,3,5," in told and ",... never arrived" in told
    )
    assert len(protocol.encode({"missing": told})) < protocol.LONGEST_LINE


def test_a_crowd_does_not_come_all_at_once() -> None:
    """More ranks than a kernel's queue of new connections holds spread themselves; fewer lose no time."""
    assert [spread_s(ranks) for ranks in (2, 1024, 4096)] == [0, 0, 0]
    waits = [spread_s(16_384) for _ in range(2000)]
    assert 0 <= min(waits) < 0.2 and 3.8 < max(waits) <= 4.1
