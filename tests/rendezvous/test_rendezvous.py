"""How ranks find each other: with real sockets, other programs on their ports, and without torch."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.base.errors import BringUpError, WorldError
from hpcinit.base.text import rank_names
from hpcinit.rendezvous import protocol, rendezvous_client
from hpcinit.rendezvous.rendezvous_client import Refused, RendezvousClient
from hpcinit.rendezvous.server import Connection, Peer, RendezvousServer, Roster
from hpcinit.world import World, fingerprint

HERE = "127.0.0.1"
MADE_OF = {"python": "3.11.7", "torch": "2.13.0"}


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports that are free now."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((HERE, 0))) for _ in range(count)]
        return tuple(server.getsockname()[1] for server in held)


@pytest.fixture
def world() -> World:
    """Return the world of rank 0 of 3 on three nodes, with free ports."""
    return World("slurm", 0, 3, 0, 1, 0, ("a", "b", "c"), HERE, free_ports(4), "77.0.0")


def open_server(world: World, **change: object) -> RendezvousServer:
    return RendezvousServer(world, **{"address": HERE, "key": "k", "job": "j", "made_of": MADE_OF, **change})  # type: ignore[arg-type]


def open_client(world: World, rank: int, within_s: float = 5, **change: object) -> RendezvousClient:
    given = {"resolve": lambda: [HERE], "key": "k", "job": "j", "made_of": MADE_OF, **change}
    return RendezvousClient(replace(world, rank=rank, node_rank=rank), deadline=time.monotonic() + within_s, **given)  # type: ignore[arg-type]


@contextlib.contextmanager
def foreign_server(port: int, behave: Callable[[socket.socket], None]) -> Iterator[list[int]]:
    """Run another program's server on `port`; yield the list of its connections."""
    server, connections = socket.create_server((HERE, port)), []

    def serve() -> None:
        kept = []
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                connections.append(1)
                kept.append(connection)
                with contextlib.suppress(OSError):
                    behave(connection)

    threading.Thread(target=serve, daemon=True).start()
    yield connections
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def in_threads(*jobs: Callable[[], object]) -> list[object]:
    """Run all at the same time; return their results or exceptions in order."""
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


def test_the_store_is_announced_when_all_are_ready(world: World) -> None:
    """All ranks get the store's port, but only when the last of them is in init."""
    host, one, two = open_server(world), open_client(world, 1), open_client(world, 2)
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
    assert host._connections.join(5)  # the server closes automatically
    assert (host.failure, one.failure, two.failure) == ("", "", "")


def test_ranks_that_connect_before_rank_0_listens(world: World) -> None:
    """Ranks that are earlier than rank 0 connect as soon as it listens."""
    late: list[RendezvousServer] = []
    threading.Timer(0.7, lambda: late.append(open_server(world))).start()
    found = in_threads(lambda: open_client(world, 1), lambda: open_client(world, 2))
    assert all(isinstance(one, RendezvousClient) for one in found) and late[0].roster.all_reached("started")


FOREIGN_SERVERS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda connection: None,
    "closes": lambda connection: connection.close(),
    "banner": lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "echo": lambda connection: connection.sendall(connection.recv(65536)),
    "garbage": lambda connection: connection.sendall(b"\xff" * 70_000),
}


@pytest.mark.parametrize("name", FOREIGN_SERVERS)
def test_a_foreign_server_on_the_first_port(world: World, name: str) -> None:
    """If another program listens on the first candidate port, whatever it does, the ranks use the next one."""
    with foreign_server(world.master_ports[0], FOREIGN_SERVERS[name]) as connections:
        host, one = open_server(world), open_client(world, 1, within_s=15)
        assert host.port == world.master_ports[1] and one.program_port == host.program_port
        assert connections  # the rank did try that port first


def test_two_jobs_with_the_same_ports(world: World) -> None:
    """Two jobs on one node with the same candidate ports both start, each with its own ranks."""
    servers = [open_server(world, key=key, job=key) for key in ("first", "second")]
    found = [[open_client(world, rank, key=key, job=key) for rank in (1, 2)] for key in ("first", "second")]
    assert [d.port for d in servers] == list(world.master_ports[:2])
    assert [{v._socket.getpeername()[1] for v in pair} for pair in found] == [{d.port} for d in servers]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"key": "from before the requeue"},
            "a process of this job with another secret: start all ranks in one folder",
        ),
        ({"job": "77.0.1#0"}, "rank 0 of another job, another attempt or another version of hpcinit"),
    ],
)
def test_a_rank_of_another_start_is_not_accepted(
    world: World, change: dict[str, str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank of an earlier attempt has another key or restart count: it is not accepted, and both sides report the reason."""
    host = open_server(world)
    with pytest.raises(BringUpError, match=rf"rank 1 on .* did not find rank 0 at {HERE}: .*:{host.port}: {why}"):
        open_client(world, 1, within_s=1.5, **change)
    assert list(host.roster.peers) == [0]
    warned = f"warning: a process at {HERE} tried to connect to rank 0 of this job with another secret"
    assert capfd.readouterr().err.count(warned) == ("key" in change)


def test_two_processes_that_claim_a_rank(world: World) -> None:
    """The second process with the same rank is refused, and the error names both; the first one stays."""
    host, first = open_server(world), open_client(world, 1)
    with pytest.raises(
        Refused, match=r"two processes claim rank 1: pid \d+ on .*, which was first, and pid \d+ on .*unset RANK"
    ):
        open_client(world, 1)
    assert host.failure == "" and first.failure == ""


def test_a_second_rank_0(world: World) -> None:
    """A second rank 0 is refused immediately, and the error names both; the first one's ranks are not disturbed."""
    host = open_server(world)
    begin = time.monotonic()
    with pytest.raises(
        Refused, match=r"two processes claim rank 0: pid \d+ on .*, which was first, and pid \d+ on .*unset RANK"
    ):
        open_server(world)
    assert time.monotonic() - begin < 2
    assert [open_client(world, rank).failure for rank in (1, 2)] == ["", ""] and host.roster.all_reached("started")


def test_two_ranks_0_at_the_same_time(world: World) -> None:
    """If two start at the same moment, one is refused within a second and the other continues."""
    begin = time.monotonic()
    one, other = sorted(
        in_threads(lambda: open_server(world), lambda: open_server(world)), key=lambda o: isinstance(o, Refused)
    )
    assert isinstance(one, RendezvousServer) and isinstance(other, Refused) and time.monotonic() - begin < 2
    assert open_client(world, 1).failure == ""


def test_rank_0_on_a_node_that_is_not_rank_0s(world: World) -> None:
    """If rank 0 cannot listen at its address and no other rank 0 is there, the error names it and the address."""
    elsewhere = "192.0.2.77"  # an address for documentation: RFC 5737
    with pytest.raises(
        BringUpError,
        match=rf"rank 0 \(pid \d+ on .*\) needs two free ports at {elsewhere}, but cannot listen on ports .*: Cann",
    ):
        open_server(world, address=elsewhere)


def test_no_rank_connects(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """If no rank connects, rank 0 reports where it listens, while it waits and at the deadline."""
    host = open_server(world)
    with pytest.raises(BringUpError, match=rf"no rank has connected to rank 0 at {HERE}:{host.port}"):
        host.wait_for_all(time.monotonic() + 0.5, 0.2)
    assert (
        "waiting, 0 s left: 2 of 3 ranks are missing: ranks 1-2 never connected (no rank connected from"
        in capfd.readouterr().err
    )


def test_an_idle_server_sleeps(world: World) -> None:
    """The server of a program that never calls init wakes up for other connections only, and still serves its ranks."""
    before = {thread.native_id for thread in threading.enumerate()}
    host = open_server(world)
    (thread,) = [each for each in threading.enumerate() if each.native_id not in before]
    one, two = open_client(world, 1), open_client(world, 2)

    def woken() -> int:
        text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    with socket.create_connection((HERE, host.port)):  # a process that never sends anything
        deadline = time.monotonic() + 20
        seen = -1
        while seen != (seen := woken()) and time.monotonic() < deadline:  # it still handles the connections
            time.sleep(0.3)
        assert time.monotonic() < deadline
    for member in (one, two):
        member.report_phase("imported")
    while [peer.phase for peer in host.roster.peers.values()][1:] != ["imported"] * 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_out_of_range(world: World) -> None:
    """A rank number outside of the world is refused."""
    open_server(world)
    with pytest.raises(Refused, match="rank 7 is not one of the 3 ranks"):
        open_client(replace(world, world_size=8, hosts=()), 7)


def test_a_rank_made_of_something_else(world: World) -> None:
    """A rank with another version of torch is reported to all ranks, with its host and the difference."""
    host, one = open_server(world), open_client(world, 1)
    open_client(world, 2, made_of={**MADE_OF, "torch": "2.12.0", "deepspeed": "0.19"})
    said = r"rank 2 on .* runs a different environment: deepspeed 0.19 \(rank 0 has none\), torch 2.12.0 \(rank 0 has 2.13.0\)"
    later = time.monotonic() + 5
    for error in in_threads(lambda: host.wait_for_store(later, 9), lambda: one.wait_for_store(later, 9)):
        assert isinstance(error, BringUpError)
        with pytest.raises(BringUpError, match=said):
            raise error


def test_a_rank_that_dies_takes_the_others_along(world: World) -> None:
    """When a rank's connection breaks, all others learn its number, host and phase within a second."""
    host, one, two = open_server(world), open_client(world, 1), open_client(world, 2)
    two._socket.shutdown(socket.SHUT_RDWR)
    begin = time.monotonic()
    for error in in_threads(lambda: host.wait_for_store(begin + 20, 9), lambda: one.wait_for_store(begin + 20, 9)):
        assert "rank 2 on" in str(error) and "died during start-up, after phase 'started'; its log" in str(error)
    assert time.monotonic() - begin < 3


def test_a_rank_that_fails_tells_why(world: World) -> None:
    """The error of a failed rank reaches all others, also if the rank leaves properly."""
    host, one, two = open_server(world), open_client(world, 1), open_client(world, 2)
    two.fail("ImportError: no module named 'flash_attn'")
    two.close()
    later = time.monotonic() + 20
    for error in in_threads(lambda: host.wait_for_store(later, 9), lambda: one.wait_for_store(later, 9)):
        assert "died during start-up, after phase 'started': ImportError: no module named 'flash_attn'" in str(error)


def test_rank_0_that_dies_takes_the_others_along(world: World) -> None:
    """When rank 0 ends during start-up the others do not wait for the deadline."""
    host, one = open_server(world), open_client(world, 1)
    host.fail("ValueError: boom")
    host.close()
    with pytest.raises(
        BringUpError, match=r"rank 0 on .* died during start-up, after phase 'started': ValueError: boom"
    ):
        one.wait_for_store(time.monotonic() + 20, 9)


def test_a_rank_that_leaves_in_peace_is_no_death(world: World) -> None:
    """A rank that ends without init does not disturb the others."""
    host, one = open_server(world), open_client(world, 1)
    one.close()
    time.sleep(0.5)
    assert host.failure == ""


def test_deadline_names_who_is_missing(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """At the deadline every rank's error names the missing ranks, hosts without ranks, and the others' progress."""
    host, one = open_server(world), open_client(world, 1)
    one.report_phase("imported")
    deadline = time.monotonic() + 1.2
    errors = in_threads(lambda: host.wait_for_store(deadline, 0.4), lambda: one.wait_for_store(deadline + 1, 9))
    for error in errors:
        assert "2 of 3 ranks are missing: rank 2 never connected (no rank connected from " in str(error)
        assert "rank 0 on" in str(error) and "started 1 s ago but got no further" in str(error)
    assert re.search(r"hpcinit: waiting, \d+ s left: 2 of 3 ranks are missing", capfd.readouterr().err)


def test_a_missing_rank_of_a_node_that_has_connected(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """If another rank of its node has connected, the line names the node of a missing rank, and the time that is left."""
    node = protocol.identity()["host"]
    six = replace(world, world_size=6, local_world_size=2, hosts=(node, "b", "c"))
    host = open_server(replace(six, ranks_here=(0, 1)))
    open_client(replace(six, ranks_here=(2, 3)), 2)
    with pytest.raises(BringUpError) as raised:
        host.wait_for_all(time.monotonic() + 0.5, 0.2)
    missing = f"4 of 6 ranks are missing: ranks 1,3 on {node}, ranks 4-5 never connected (no rank connected from "
    assert missing in str(raised.value) and raised.value.host_at_fault == "b"
    assert re.search(rf"waiting, \d+ s left: {re.escape(missing)}", capfd.readouterr().err)


def test_rank_0_never_listens(world: World) -> None:
    """If rank 0 never listens, the error lists the result for each port."""
    with pytest.raises(
        BringUpError, match=rf"{HERE}:{world.master_ports[0]}: connection refused; .*Did rank 0 start there"
    ):
        open_client(world, 1, within_s=0.5)


def test_a_name_that_does_not_resolve(world: World) -> None:
    """If rank 0's name does not resolve on this node, the error is exactly that."""

    def resolve() -> list[str]:
        raise WorldError("n1 does not resolve on n7")

    with pytest.raises(BringUpError, match=r"did not find rank 0 at 127.0.0.1: 127.0.0.1: n1 does not resolve on n7"):
        open_client(world, 1, within_s=0.5, resolve=resolve)


def test_all_ports_taken(world: World) -> None:
    """If no port is free, rank 0 lists the ports and the reasons."""
    with contextlib.ExitStack() as stack:
        for port in world.master_ports:
            stack.enter_context(socket.create_server((HERE, port)))
        with pytest.raises(
            BringUpError, match=rf"cannot listen on ports {world.master_ports[0]}: Address already in use; "
        ):
            open_server(world)


def test_the_key_never_crosses_the_wire(world: World) -> None:
    """A listener that records everything never sees the key, and cannot act as rank 0 with the recording."""
    seen: list[bytes] = []
    with foreign_server(world.master_ports[0], lambda connection: seen.append(connection.recv(65536))):
        open_server(world, key="secret-key-of-this-job")
        open_client(world, 1, within_s=15, key="secret-key-of-this-job")
    assert seen and all(b"secret-key" not in data for data in seen)


def test_foreign_connections_do_no_harm(world: World) -> None:
    """Garbage, silence and wrong proofs from other processes do not keep a rank out."""
    host = open_server(world)
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
    assert open_client(world, 1).failure == "" and open_client(world, 2).failure == "" and host.failure == ""


def test_the_roll_in_words() -> None:
    """Consecutive ranks are folded into ranges, and a long list of late ranks is cut."""
    assert [rank_names([3]), rank_names([4, 5, 6, 9]), rank_names([1, 3])] == ["rank 3", "ranks 4-6,9", "ranks 1,3"]
    roster = Roster(40, ["a"])
    roster.peers = {rank: Peer(rank, "a", 1) for rank in range(40)}
    assert "and 24 more" in roster.missing("up") and roster.missing("started") == "" and roster.lost() == ""


def test_fingerprint_needs_no_imports_and_finds_the_commit(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Versions are read from metadata, and the commit from .git, loose or packed."""
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


def test_a_slow_reply_of_rank_0(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has checked rank 0's proof waits for the reply until the deadline: disconnecting would count as death."""
    monkeypatch.setattr(rendezvous_client, "CONNECT_S", 0.3)
    opened = open_server(world)
    send = Connection.send

    def late(caller: Connection, message: dict[str, object]) -> None:
        if "reply" in message:
            time.sleep(1)
        send(caller, message)

    monkeypatch.setattr(Connection, "send", late)
    peer = open_client(world, 1)
    assert opened.failure == ""
    peer.close()
    opened.close()


def test_a_rank_that_connects_after_a_failure(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """If rank 0 fails before ranks have connected, it waits a moment, and each rank that connects gets the error."""
    opened = open_server(world)
    opened.fail("no such script")
    leaving = threading.Thread(target=lambda: (opened.linger_after_failure(), opened.close()))
    began = time.monotonic()
    leaving.start()
    for rank in (1, 2):
        peer = open_client(world, rank)
        with pytest.raises(BringUpError, match=r"rank 0 .*no such script"):
            peer.wait_for_all(time.monotonic() + 20, 10)
        peer.close()
    leaving.join(10)
    assert not leaving.is_alive() and time.monotonic() - began < 10, "all ranks have connected: rank 0 must not wait"
    assert "to inform ranks that connect late: rank 0" in capsys.readouterr().err


def test_no_second_wait_after_the_deadline(world: World) -> None:
    """After a timeout of the start-up, rank 0 does not wait again."""
    opened = open_server(world)
    with pytest.raises(BringUpError, match="never connected"):
        opened.wait_for_all(time.monotonic() + 0.1, 10)
    began = time.monotonic()
    opened.linger_after_failure()
    assert time.monotonic() - began < 5
    opened.close()


def test_rank_0_is_done_while_a_rank_is_in_init(world: World) -> None:
    """If rank 0's program ends without init, a rank in init gets an error before the deadline."""
    opened = open_server(replace(world, world_size=2, hosts=("a", "b")))
    peer = open_client(world, 1)
    peer.report_phase("imported")
    opened.close()
    with pytest.raises(BringUpError, match=r"rank 0 on .* stopped before rank .* must call"):
        peer.wait_for_store(time.monotonic() + 20, 10)
    peer.close()
