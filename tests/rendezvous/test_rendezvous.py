"""How ranks find each other: real sockets, real processes' worth of strangers, no torch."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from hpcinit.base.errors import BringUpError, WorldError
from hpcinit.rendezvous import fingerprint, protocol, rendezvous_client
from hpcinit.rendezvous.connections import Connection
from hpcinit.rendezvous.rendezvous_client import Refused, RendezvousClient
from hpcinit.rendezvous.roster import Peer, Roster, ranks
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.world import World

HERE = "127.0.0.1"
MADE_OF = {"python": "3.11.7", "torch": "2.13.0"}


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((HERE, 0))) for _ in range(count)]
        return tuple(server.getsockname()[1] for server in held)


@pytest.fixture
def world() -> World:
    """Rank 0 of 3 on three nodes, with ports of its own."""
    return World("slurm", 0, 3, 0, 1, 0, ("a", "b", "c"), HERE, free_ports(4), "77.0.0")


def door(world: World, **change: object) -> RendezvousServer:
    return RendezvousServer(world, **{"address": HERE, "key": "k", "job": "j", "made_of": MADE_OF, **change})  # type: ignore[arg-type]


def visit(world: World, rank: int, within_s: float = 5, **change: object) -> RendezvousClient:
    given = {"resolve": lambda: [HERE], "key": "k", "job": "j", "made_of": MADE_OF, **change}
    return RendezvousClient(replace(world, rank=rank, node_rank=rank), deadline=time.monotonic() + within_s, **given)  # type: ignore[arg-type]


@contextlib.contextmanager
def stranger(port: int, behave: Callable[[socket.socket], None]) -> Iterator[list[int]]:
    """Somebody else's server on `port`; yields the list of its visits."""
    server, visits = socket.create_server((HERE, port)), []

    def serve() -> None:
        kept = []
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                visits.append(1)
                kept.append(connection)
                with contextlib.suppress(OSError):
                    behave(connection)

    threading.Thread(target=serve, daemon=True).start()
    yield visits
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def in_threads(*jobs: Callable[[], object]) -> list[object]:
    """Run all at the same time; their results or exceptions in order."""
    results: list[object] = [None] * len(jobs)

    def run(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except BringUpError as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_everybody_hears_of_the_store_when_all_are_ready(world: World) -> None:
    """The store's port is told to all ranks, and only once the last of them is in init."""
    host, one, two = door(world), visit(world, 1), visit(world, 2)
    host.offer_store(4242)
    for member in (host, one):
        member.report_phase("imported")
    time.sleep(0.3)
    assert one._store_port is None
    two.report_phase("imported")
    later = time.monotonic() + 5
    assert [member.wait_for_store(later, 9) for member in (host, one, two)] == [4242] * 3
    assert one.program_port == two.program_port == host.program_port in world.master_ports
    for member in (host, one, two):
        member.report_phase("up")
    assert host._connections.join(5)  # the door closes by itself
    assert (host.failure, one.failure, two.failure) == ("", "", "")


def test_ranks_that_knock_before_the_door_is_there(world: World) -> None:
    """Ranks that are earlier than rank 0 come in as soon as it opens."""
    late: list[RendezvousServer] = []
    threading.Timer(0.7, lambda: late.append(door(world))).start()
    found = in_threads(lambda: visit(world, 1), lambda: visit(world, 2))
    assert all(isinstance(one, RendezvousClient) for one in found) and late[0].roster.all_reached("started")


STRANGERS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda connection: None,
    "closes": lambda connection: connection.close(),
    "banner": lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "echo": lambda connection: connection.sendall(connection.recv(65536)),
    "garbage": lambda connection: connection.sendall(b"\xff" * 70_000),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_foreign_server_on_the_first_port(world: World, name: str) -> None:
    """With somebody else's server on the first candidate, whatever it does, the ranks meet at the next."""
    with stranger(world.master_ports[0], STRANGERS[name]) as visits:
        host, one = door(world), visit(world, 1, within_s=15)
        assert host.port == world.master_ports[1] and one.program_port == host.program_port
        assert visits  # the rank did look there first


def test_two_jobs_with_the_same_ports(world: World) -> None:
    """Two jobs on one node with the same candidates come up side by side, each with its own ranks."""
    doors = [door(world, key=key, job=key) for key in ("first", "second")]
    found = [[visit(world, rank, key=key, job=key) for rank in (1, 2)] for key in ("first", "second")]
    assert [d.port for d in doors] == list(world.master_ports[:2])
    assert [{v._socket.getpeername()[1] for v in pair} for pair in found] == [{d.port} for d in doors]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"key": "from before the requeue"},
            "a process of this job with another secret: start all ranks in one folder",
        ),
        ({"job": "77.0.1#0"}, "hpcinit of another job, start or version"),
    ],
)
def test_a_rank_of_another_start_never_gets_in(
    world: World, change: dict[str, str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank of an earlier attempt has another key or restart count: it stays outside, and both sides report why."""
    host = door(world)
    with pytest.raises(BringUpError, match=rf"rank 1 on .* did not find rank 0 at {HERE}: .*:{host.port}: {why}"):
        visit(world, 1, within_s=1.5, **change)
    assert list(host.roster.peers) == [0]
    warned = f"warning: a process at {HERE} asked for rank 0 of this job with another secret"
    assert capfd.readouterr().err.count(warned) == ("key" in change)


def test_two_processes_that_claim_a_rank(world: World) -> None:
    """The second claimant of a rank is refused, with both processes named; the first stays."""
    host, first = door(world), visit(world, 1)
    with pytest.raises(
        Refused, match=r"two processes claim rank 1: pid \d+ on .*, which came first, and pid \d+ on .*left over"
    ):
        visit(world, 1)
    assert host.failure == "" and first.failure == ""


def test_a_second_rank_0(world: World) -> None:
    """A second process that claims rank 0 is refused at once, with both named; the first one's ranks meet undisturbed."""
    host = door(world)
    begin = time.monotonic()
    with pytest.raises(
        Refused, match=r"two processes claim rank 0: pid \d+ on .*, which came first, and pid \d+ on .*left over"
    ):
        door(world)
    assert time.monotonic() - begin < 2
    assert [visit(world, rank).failure for rank in (1, 2)] == ["", ""] and host.roster.all_reached("started")


def test_a_second_rank_0_on_a_port_that_has_become_free(world: World) -> None:
    """Nor can it take an earlier port that was somebody else's when the first one came."""
    with stranger(world.master_ports[0], STRANGERS["closes"]):
        first = door(world)
    with pytest.raises(Refused, match="two processes claim rank 0"):
        door(world)
    assert first.port == world.master_ports[1] and visit(world, 1).failure == ""


def test_two_ranks_0_at_the_same_time(world: World) -> None:
    """Of two that begin at the same moment one is refused within a second, and the other goes on."""
    begin = time.monotonic()
    one, other = sorted(in_threads(lambda: door(world), lambda: door(world)), key=lambda o: isinstance(o, Refused))
    assert isinstance(one, RendezvousServer) and isinstance(other, Refused) and time.monotonic() - begin < 2
    assert visit(world, 1).failure == ""


def test_rank_0_on_a_node_that_is_not_rank_0s(world: World) -> None:
    """Rank 0 that cannot listen where it should asks who is there; with nobody there, it names itself and the address."""
    elsewhere = "192.0.2.77"  # of nobody: RFC 5737
    with pytest.raises(
        BringUpError, match=rf"rank 0 \(pid \d+ on .*\) cannot listen at {elsewhere}, tried ports .*: Cann"
    ):
        door(world, address=elsewhere)


def test_a_door_that_nobody_finds(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 to whom nobody comes says where it waits, while it waits and at the deadline."""
    host = door(world)
    with pytest.raises(BringUpError, match=rf"no rank has connected to rank 0 at {HERE}:{host.port}"):
        host.wait_for_all(time.monotonic() + 0.5, 0.2)
    assert "waiting: 2 of 3 ranks are missing: ranks 1-2 never arrived (nobody came from" in capfd.readouterr().err


def test_an_idle_door_sleeps(world: World) -> None:
    """A door that is kept for a program which never calls init wakes up for strangers only, and still hears its ranks."""
    host, one, two = door(world), visit(world, 1), visit(world, 2)
    deadline = time.monotonic() + 5  # a guest may be through before the door has put its name down
    while host._connections._patience_s() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert host._connections._patience_s() is None
    with socket.create_connection((HERE, host.port)):
        time.sleep(0.2)
        assert 5 < (host._connections._patience_s() or 0) < 11
    for member in (one, two):
        member.report_phase("imported")
    time.sleep(0.2)
    assert (
        host._connections._patience_s() is None
        and [g.phase for g in host.roster.peers.values()][1:] == ["imported"] * 2
    )


def test_a_rank_out_of_range(world: World) -> None:
    """A rank that the world does not have is refused by number."""
    door(world)
    with pytest.raises(Refused, match="rank 7 is not one of the 3 ranks"):
        visit(replace(world, world_size=8, hosts=()), 7)


def test_a_rank_made_of_something_else(world: World) -> None:
    """A rank with another torch is named to everybody, with its host and the difference."""
    host, one = door(world), visit(world, 1)
    visit(world, 2, made_of={**MADE_OF, "torch": "2.12.0", "deepspeed": "0.19"})
    said = r"rank 2 on .* is not made like rank 0: deepspeed 0.19 instead of absent, torch 2.12.0 instead of 2.13.0"
    later = time.monotonic() + 5
    for error in in_threads(lambda: host.wait_for_store(later, 9), lambda: one.wait_for_store(later, 9)):
        assert isinstance(error, BringUpError)
        with pytest.raises(BringUpError, match=said):
            raise error


def test_a_rank_that_dies_takes_the_others_along(world: World) -> None:
    """When a rank's connection breaks, all others hear within a second which it was, where, and how far it got."""
    host, one, two = door(world), visit(world, 1), visit(world, 2)
    two._socket.shutdown(socket.SHUT_RDWR)
    begin = time.monotonic()
    for error in in_threads(lambda: host.wait_for_store(begin + 20, 9), lambda: one.wait_for_store(begin + 20, 9)):
        assert "rank 2 on" in str(error) and "died during start-up, when it had started; its own log" in str(error)
    assert time.monotonic() - begin < 3


def test_a_rank_that_fails_tells_why(world: World) -> None:
    """A rank that ends with an error of its own tells it to all others, also when it takes its leave in order."""
    host, one, two = door(world), visit(world, 1), visit(world, 2)
    two.fail("ImportError: no module named 'flash_attn'")
    two.close()
    later = time.monotonic() + 20
    for error in in_threads(lambda: host.wait_for_store(later, 9), lambda: one.wait_for_store(later, 9)):
        assert "died during start-up, when it had started: ImportError: no module named 'flash_attn'" in str(error)


def test_rank_0_that_dies_takes_the_others_along(world: World) -> None:
    """When rank 0 ends during start-up the others do not wait for the deadline."""
    host, one = door(world), visit(world, 1)
    host.fail("ValueError: boom")
    host.close()
    with pytest.raises(BringUpError, match=r"rank 0 on .* died during start-up, when it had started: ValueError: boom"):
        one.wait_for_store(time.monotonic() + 20, 9)


def test_a_rank_that_leaves_in_peace_is_no_death(world: World) -> None:
    """A program that ends without init disturbs nobody."""
    host, one = door(world), visit(world, 1)
    one.close()
    time.sleep(0.5)
    assert host.failure == ""


def test_deadline_names_who_is_missing(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """At the deadline every rank's error says who never came, from which host nobody came, and who got how far."""
    host, one = door(world), visit(world, 1)
    one.report_phase("imported")
    deadline = time.monotonic() + 1.2
    errors = in_threads(lambda: host.wait_for_store(deadline, 0.4), lambda: one.wait_for_store(deadline + 1, 9))
    for error in errors:
        assert "2 of 3 ranks are missing: rank 2 never arrived (nobody came from " in str(error)
        assert "rank 0 on" in str(error) and "started 1 s ago and no further" in str(error)
    assert "hpcinit: waiting: 2 of 3 ranks are missing" in capfd.readouterr().err


def test_nobody_at_home(world: World) -> None:
    """Where rank 0 never opens, the error lists what was seen at each port."""
    with pytest.raises(
        BringUpError, match=rf"{HERE}:{world.master_ports[0]}: connection refused; .*Did rank 0 start there"
    ):
        visit(world, 1, within_s=0.5)


def test_a_name_that_does_not_resolve(world: World) -> None:
    """A master name that means nothing on this node is said to be just that."""

    def resolve() -> list[str]:
        raise WorldError("n1 does not resolve on n7")

    with pytest.raises(BringUpError, match=r"did not find rank 0 at 127.0.0.1: 127.0.0.1: n1 does not resolve on n7"):
        visit(world, 1, within_s=0.5, resolve=resolve)


def test_all_ports_taken(world: World) -> None:
    """Rank 0 that finds no free port lists the ports and the reasons."""
    with contextlib.ExitStack() as stack:
        for port in world.master_ports:
            stack.enter_context(socket.create_server((HERE, port)))
        with pytest.raises(BringUpError, match=rf"tried ports {world.master_ports[0]}: Address already in use; "):
            door(world)


def test_the_key_never_crosses_the_wire(world: World) -> None:
    """A listener that records everything never sees the key, and cannot play the door with what it saw."""
    seen: list[bytes] = []
    with stranger(world.master_ports[0], lambda connection: seen.append(connection.recv(65536))):
        door(world, key="secret-key-of-this-job")
        visit(world, 1, within_s=15, key="secret-key-of-this-job")
    assert seen and all(b"secret-key" not in data for data in seen)


def test_strangers_at_our_door_do_no_harm(world: World) -> None:
    """Garbage, silence and wrong proofs at the door keep nobody out who belongs in."""
    host = door(world)
    noise = []
    for data in (
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x00" * 100_000,
        b"[1]\n",
        b'{"hello": 1}\n',
        protocol.encode({"hello": protocol.GREETING, "job": "j", "challenge": 5}),
    ):
        connection = socket.create_connection((HERE, host.port))
        noise.append(connection)
        with contextlib.suppress(OSError):
            connection.sendall(data)
    assert visit(world, 1).failure == "" and visit(world, 2).failure == "" and host.failure == ""


def test_the_roll_in_words() -> None:
    """Runs of ranks are folded, and a long list of late ones is cut."""
    assert [ranks([3]), ranks([4, 5, 6, 9]), ranks([1, 3])] == ["rank 3", "ranks 4-6,9", "ranks 1,3"]
    roster = Roster(40, ["a"])
    roster.peers = {rank: Peer(rank, "a", 1) for rank in range(40)}
    assert "and 24 more" in roster.missing("up") and roster.missing("started") == "" and roster.lost() == ""


def test_fingerprint_needs_no_imports_and_finds_the_commit(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Versions come from metadata; the commit is read from .git, loose or packed."""
    assert {"python", "hpcinit", "torch"} <= set(fingerprint.fingerprint())
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    assert fingerprint.commit(tmp_path / "sub") == ""
    (tmp_path / ".git/packed-refs").write_text("# pack-refs\nabc123 refs/heads/main\n")
    assert fingerprint.commit(tmp_path / "sub") == "abc123"
    (tmp_path / ".git/refs/heads/main").write_text("def456\n")
    assert fingerprint.commit(tmp_path / "sub") == "def456"
    (tmp_path / ".git/HEAD").write_text("0a1b\n")
    assert fingerprint.commit(tmp_path) == "0a1b"


def test_a_door_that_is_slow_to_welcome_loses_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest that has seen the door's proof waits for its welcome, however busy that node is: to hang up is death."""
    monkeypatch.setattr(rendezvous_client, "CONNECT_S", 0.3)
    opened = door(world)
    send = Connection.send

    def late(caller: Connection, message: dict[str, object]) -> None:
        if "reply" in message:
            time.sleep(1)
        send(caller, message)

    monkeypatch.setattr(Connection, "send", late)
    peer = visit(world, 1)
    assert opened.failure == ""
    peer.close()
    opened.close()


def test_who_comes_after_a_failure_is_told(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 fails before anybody has come: it waits a moment, and each rank that comes hears of it at once."""
    opened = door(world)
    opened.fail("no such script")
    leaving = threading.Thread(target=lambda: (opened.linger_after_failure(), opened.close()))
    began = time.monotonic()
    leaving.start()
    for rank in (1, 2):
        peer = visit(world, rank)
        with pytest.raises(BringUpError, match=r"rank 0 .*no such script"):
            peer.wait_for_all(time.monotonic() + 20, 10)
        peer.close()
    leaving.join(10)
    assert not leaving.is_alive() and time.monotonic() - began < 10, "all have come: nobody is waited for"
    assert "for those who come now: rank 0" in capsys.readouterr().err


def test_no_second_wait_for_who_never_came(world: World) -> None:
    """After a start-up that has waited to its deadline, rank 0 does not wait once more."""
    opened = door(world)
    with pytest.raises(BringUpError, match="never arrived"):
        opened.wait_for_all(time.monotonic() + 0.1, 10)
    began = time.monotonic()
    opened.linger_after_failure()
    assert time.monotonic() - began < 5
    opened.close()


def test_rank_0_that_is_done_keeps_nobody_waiting_in_init(world: World) -> None:
    """Rank 0's program ends without init: a rank that is in init is told so, not held until the deadline."""
    opened = door(replace(world, world_size=2, hosts=("a", "b")))
    peer = visit(world, 1)
    peer.report_phase("imported")
    opened.close()
    with pytest.raises(BringUpError, match=r"rank 0 on .* has ended its part .* does every rank"):
        peer.wait_for_store(time.monotonic() + 20, 10)
    peer.close()
