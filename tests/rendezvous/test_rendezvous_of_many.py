"""A rendezvous of thousands of ranks must stay cheap: shown with few ranks here, with thousands in benchmarks/store.py."""

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
from hpcinit.rendezvous import protocol, rendezvous_client, server
from hpcinit.rendezvous.rendezvous_client import spread_s
from hpcinit.rendezvous.server import PHASES, Connection, Peer, Roster
from hpcinit.world import World
from tests.rendezvous.test_rendezvous import FOREIGN_SERVERS, HERE, foreign_server, free_ports, open_client, open_server

SKEWED_CLIENT = """
import json, sys, time
true = time.time
time.time = lambda: true() - float(sys.argv[2])
from tests.rendezvous.test_rendezvous import World, open_client
world = World("slurm", 0, 2, 0, 1, 0, ("a", "b"), "127.0.0.1", (int(sys.argv[1]),), "77.0.0")
one = open_client(world, 1, within_s=60)
print(json.dumps([one.clock_offset_s, one.clock_uncertainty_s]))
"""


@pytest.fixture
def world() -> World:
    """Return the world of rank 0 of 3 on three nodes, with free ports."""
    return World("slurm", 0, 3, 0, 1, 0, ("a", "b", "c"), HERE, free_ports(4), "77.0.0")


@pytest.mark.parametrize("behind_s", [0.0, 100.0, -7.5])
def test_a_rank_learns_how_far_ahead_rank_0s_clock_is(world: World, behind_s: float) -> None:
    """A rank on a node with a wrong clock measures its offset as it joins, within the reported uncertainty."""
    host = open_server(world)
    words = [sys.executable, "-c", SKEWED_CLIENT, str(host.port), str(behind_s)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    offset_s, uncertainty_s = json.loads(done.stdout)
    assert 0 <= uncertainty_s < 5
    assert abs(offset_s - behind_s) <= uncertainty_s + 0.01  # both processes really have the same clock
    assert (host.clock_offset_s, host.clock_uncertainty_s) == (0, 0)


def test_the_offset_is_bounded_from_both_sides() -> None:
    """The tightest limit of each direction counts, one direction alone is not enough, and invalid stamps are ignored."""
    offset = protocol.ClockOffset()
    offset.learn(None, [110.0, 110.0], 10.5)  # sent at 110, read at 10.5: at least 99.5 ahead
    assert offset.known is None
    offset.learn(10.0, [111.0, 111.2], 11.0)  # sent at 10, read at 111: at most 101; and at least 100.2
    assert offset.known == pytest.approx((100.6, 0.4))
    for nothing in (None, [], ["1", 2], 5, [1.0]):
        offset.learn(10.0, nothing, 11.0)
    assert offset.known == pytest.approx((100.6, 0.4))


def test_joining_takes_the_same_messages_however_many_ranks_there_are(world: World) -> None:
    """A joining rank sends two messages and gets two, which include its clock's offset and the identity check."""
    heard: list[dict[str, object]] = []
    said: list[dict[str, object]] = []
    host = open_server(world)
    hear, send = host._connections._on_message, Connection.send
    host._connections._on_message = lambda caller, message: (heard.append(message), hear(caller, message))[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", lambda caller, message: (said.append(message), send(caller, message))[1])
        assert open_client(world, 1).clock_offset_s is not None
    assert [sorted({"hello", "rank"} & set(message)) for message in heard] == [["hello"], ["rank"]]
    assert [sorted({"hello", "reply"} & set(message)) for message in said] == [["hello"], ["reply"]]


def test_what_is_counted_is_what_a_walk_finds() -> None:
    """The counts equal a check of every rank, in any order of connects, phases and reconnects."""
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


def test_missing_ranks_are_computed_once_at_the_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank asks for the missing ranks at its deadline: rank 0 computes them once a second, not for each."""
    host, one, two = open_server(world), open_client(world, 1), open_client(world, 2)
    walks: list[str] = []
    missing = host.roster.missing
    monkeypatch.setattr(host.roster, "missing", lambda phase: (walks.append(phase), missing(phase))[1])
    told = [each.missing("imported") for each in (one, two, one, two)]
    assert all("3 of 3 ranks are missing" in text for text in told) and walks == ["imported"]


def test_a_silent_port_gets_more_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank waits twice as long at a silent port the next time: it may be its rank 0 with a long queue."""
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
    with (
        foreign_server(world.master_ports[0], FOREIGN_SERVERS["silent"]),
        pytest.raises(BringUpError, match="sends nothing"),
    ):
        open_client(world, 1, within_s=3)
    assert given[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])


def test_too_few_files_for_the_ranks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rank 0's limit of open files is too low for all ranks, it fails with the number before it listens."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(BringUpError, match=r"4096 open files .* each of the 16384 ranks.* to 33792 or more"):
        server.allow_many_files(16_384)


def test_files_for_the_server_and_for_torchs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 raises its limit before it listens, for more than two connections of each rank, up to the hard limit."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for hard in (100_000, 30_000):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (1024, hard))
        server.allow_many_files(16_384)
    assert asked == [(100_000, 100_000), (30_000, 30_000)]


def test_no_files_left_for_connections(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """A server without free files reports it once, does not spin, and accepts the others when files are free again."""
    host = open_server(world)
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
    assert said.count("rank 0 cannot accept more connections") == 1
    assert open_client(world, 1, within_s=30).failure == "" and capfd.readouterr().err == ""


@pytest.fixture
def default_interval() -> Iterator[None]:
    """Use Python's default: other tests have left servers open."""
    found = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(found)


@pytest.mark.usefixtures("default_interval")
def test_the_server_gets_its_turn_while_rank_0_computes(world: World) -> None:
    """While a server is open Python switches threads quickly, and as before when it is closed."""
    host = open_server(world)
    assert open_client(world, 1).failure == ""
    assert sys.getswitchinterval() == pytest.approx(server.QUICK_S)
    host.close()
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.usefixtures("default_interval")
def test_a_programs_own_switch_interval_stays(world: World) -> None:
    """If the program sets Python's interval while the server is open, its value remains."""
    host = open_server(world)
    assert open_client(world, 1).failure == ""
    sys.setswitchinterval(0.01)
    host.close()
    assert sys.getswitchinterval() == pytest.approx(0.01)


def test_a_broadcast_is_encoded_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message to all ranks is encoded once, not for each rank."""
    host = open_server(world)
    peers = [open_client(world, rank) for rank in (1, 2)]
    encoded: list[dict[str, object]] = []
    encode = protocol.encode
    monkeypatch.setattr(protocol, "encode", lambda message: (encoded.append(message), encode(message))[1])
    host.fail("no such script")
    # Rank 0 may still announce that all ranks have connected.
    assert [message["failed"] for message in encoded if "failed" in message] == [host.failure]
    for peer in peers:
        with pytest.raises(BringUpError, match="no such script"):
            peer.wait_for_store(time.monotonic() + 30, 10)


def test_thousands_of_missing_ranks_fit_into_a_line(world: World) -> None:
    """For any number of missing ranks and nodes the message fits into one line: folded, and cut if necessary."""
    hosts = tuple(f"node{number:05}" for number in range(16_384))
    every = Roster(16_384, hosts).missing("started")
    assert "ranks 0-16383 never connected (no rank connected from node[00000-16383])" in every
    odd = Roster(16_384, hosts)
    for rank in range(0, 16_384, 2):
        odd.enter(Peer(rank, hosts[rank], 1))
    told = odd.missing("started")
    assert (
        len(told) < 5_000 and "8192 of 16384 ranks are missing: ranks 1,3,5," in told and ",... never connected" in told
    )
    assert len(protocol.encode({"missing": told})) < protocol.LONGEST_LINE


def test_many_ranks_do_not_connect_at_the_same_moment() -> None:
    """Ranks spread their connections if they are more than the kernel's queue of new connections; fewer lose no time."""
    assert [spread_s(ranks) for ranks in (2, 1024, 4096)] == [0, 0, 0]
    waits = [spread_s(16_384) for _ in range(2000)]
    assert 0 <= min(waits) < 0.2 and 3.8 < max(waits) <= 4.1
