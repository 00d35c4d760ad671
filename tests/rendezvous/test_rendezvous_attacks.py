"""What another user of a node can do to the rendezvous: relay messages, act as rank 0, flood its port."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.rendezvous import protocol
from hpcinit.rendezvous.rendezvous_client import JoinRequest, Refused, connect
from hpcinit.world import World, network
from tests.rendezvous.test_rendezvous import HERE, MADE_OF, free_ports, open_client, open_server

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def world() -> World:
    return World("slurm", 0, 3, 0, 1, 0, ("a", "b", "c"), HERE, free_ports(4), "77.0.0")


@contextlib.contextmanager
def relay(listen: tuple[str, int], to: tuple[str, int]) -> Iterator[list[int]]:
    """Run a process in between, which relays data between `listen` and `to`. Yield its clients."""
    server = socket.create_server(listen, family=network.family(listen[0]))
    clients: list[int] = []

    def copy(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                clients.append(1)
                with contextlib.suppress(OSError):
                    behind = socket.create_connection(to)
                    for pair in ((client, behind), (behind, client)):
                        threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield clients
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.mark.parametrize("address", [HERE, "127.0.0.9"])
def test_a_process_in_between_is_not_accepted(world: World, address: str) -> None:
    """A process that relays the answers of rank 0, at another port or address, gets no rank."""
    host = open_server(world)
    port = host.port if address != HERE else free_ports(1)[0]
    claim = JoinRequest(1, "k", "j", MADE_OF)
    with relay((address, port), (HERE, host.port)) as clients:
        with pytest.raises(
            protocol.NotOurs, match=rf"relays the answers of rank 0, which listens at {HERE}:{host.port}: "
        ):
            connect(address, port, claim)
        assert clients
    assert list(host.roster.peers) == [0] and open_client(world, 1).failure == ""


def test_the_rank_finds_rank_0_beside_a_process_in_between(world: World) -> None:
    """With a relay on the first candidate port, a rank connects to rank 0 itself, on the next port."""
    with relay((HERE, world.master_ports[0]), (HERE, world.master_ports[1])) as clients:
        host, one = open_server(world), open_client(world, 1)
        assert one._socket.getpeername()[1] == host.port == world.master_ports[1]
        assert len(clients) >= 1


def test_translated_addresses_take_an_explicit_setting(world: World) -> None:
    """Behind a NAT, which keeps ports and changes addresses, ranks start if and only if nat is set on both sides."""
    for mine, theirs in ((False, True), (True, False)):
        host = open_server(world, nat=mine)
        with relay(("127.0.0.9", host.port), (HERE, host.port)), pytest.raises(protocol.NotOurs):
            connect("127.0.0.9", host.port, JoinRequest(1, "k", "j", MADE_OF, theirs))
        host.close()
    host = open_server(world, nat=True)
    with relay(("127.0.0.9", host.port), (HERE, host.port)):
        assert (
            connect("127.0.0.9", host.port, JoinRequest(1, "k", "j", MADE_OF, True)).program_port == host.program_port
        )


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this machine")
def test_one_address_in_several_notations() -> None:
    """IPv6 scopes and IPv4 addresses in IPv6 notation do not change the listener's endpoint."""
    ends = [("10.0.0.1", 7), ("::ffff:10.0.0.1", 7, 0, 0), ("fe80::1%eth0", 7, 0, 2), ("fe80:0::1", 7, 0, 3)]
    assert [protocol.endpoint(end, False) for end in ends] == ["10.0.0.1:7", "10.0.0.1:7", "fe80::1:7", "fe80::1:7"]
    assert protocol.endpoint(ends[0], True) == "*:7"


IMPOSTOR = """
import os, socket, sys, time
sys.path.insert(0, {root!r})
from hpcinit.rendezvous import protocol
os.setgid({gid})
os.setuid({uid})
key, job, at = {key!r}, {job!r}, "{address}:{port}"

def serve(connection):
    lines = protocol.Lines()
    hello = protocol.receive(connection, lines)[0]
    proof = protocol.proof(key, "server", hello["challenge"], at + "|" + job)
    mine = {{"hello": protocol.GREETING, "proof": proof, "challenge": "c", "at": at, "key_id": protocol.key_id(key, job)}}
    connection.sendall(protocol.encode({{**mine, "clock": [time.time(), time.time()]}}))
    hand = protocol.receive(connection, lines)[0]
    connection.sendall(protocol.encode({{"reply": 4242}}))
    print("accepted", hand["rank"], flush=True)
    time.sleep(60)

server = socket.create_server(({address!r}, {port}))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    try:
        serve(connection)
    except (OSError, EOFError, KeyError, protocol.NotOurs):
        connection.close()
"""


@contextlib.contextmanager
def another_process(script: str, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Run `script` in another process until it has printed a line. before: a command that starts it."""
    process = subprocess.Popen([*before, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd="/")
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@needs_root
def test_another_user_who_acts_as_rank_0_and_holds_the_key(world: World) -> None:
    """If another process accepts rank 0 as a rank, rank 0 stops and names both processes and the other one's user."""
    nobody = pwd.getpwnam("nobody")
    script = IMPOSTOR.format(
        uid=nobody.pw_uid, gid=nobody.pw_gid, root=str(ROOT), key="k", job="j", address=HERE, port=world.master_ports[0]
    )
    with another_process(script), pytest.raises(Refused) as refused:
        open_server(world)
    assert re.search(
        rf"two processes act as rank 0 of this job: pid {os.getpid()} on .*, and a process that listens at "
        rf"{HERE}:{world.master_ports[0]}, started by user {nobody.pw_uid}, which accepted this one",
        str(refused.value),
    )


FLOOD = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.path.insert(0, {root!r})
from hpcinit.rendezvous import protocol
hello = protocol.encode({{"hello": protocol.GREETING, "job": "j", "challenge": "0" * 32}})
kept, until = [], time.monotonic() + 60
print("ready", flush=True)
while time.monotonic() < until:
    connection = socket.socket()
    try:
        connection.settimeout(0.5)
        connection.connect(({address!r}, {port}))
        if {greets}:
            connection.sendall(hello)
    except OSError:
        pass
    kept.append(connection)
    if len(kept) > 3000:
        kept.pop(0).close()
"""

RANKS = """
import sys, threading, time
sys.path.insert(0, {root!r})
from dataclasses import replace
from hpcinit.world import World
from hpcinit.rendezvous.rendezvous_client import RendezvousClient
start_time, started = time.monotonic(), []
def start(rank):
    world = World("slurm", rank, 9, 0, 1, 0, (), {address!r}, ({port},), "77.0.0")
    client = RendezvousClient(world, lambda: [{address!r}], "k", "j", {made_of!r}, time.monotonic() + 60)
    client.wait_for_all(time.monotonic() + 60, 9)
    started.append(rank)
    client.close()
threads = [threading.Thread(target=start, args=(rank,)) for rank in range(1, 9)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(started), time.monotonic() - start_time, flush=True)
"""


@pytest.mark.parametrize("greets", [False, True])
def test_a_flood_of_connections_keeps_no_rank_out(greets: bool) -> None:
    """8 ranks start while other processes open and keep connections as fast as they can."""
    world = World("slurm", 0, 9, 0, 1, 0, (), HERE, free_ports(4), "77.0.0")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))  # the usual limit, which rank 0 raises a little
    try:
        _flood(world, greets)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _flood(world: World, greets: bool) -> None:
    host = open_server(world)
    flood = FLOOD.format(root=str(ROOT), address=HERE, port=host.port, greets=greets)
    with another_process(flood), another_process(flood):
        time.sleep(3)
        ranks = RANKS.format(root=str(ROOT), address=HERE, port=host.port, made_of=MADE_OF)
        done = subprocess.run([sys.executable, "-c", ranks], capture_output=True, text=True, timeout=100, check=False)
        count, seconds = done.stdout.split() or ("0", "0")
        strangers = len(host._connections._unauthenticated)
    assert count == "8", done.stderr[-2000:]
    assert host.roster.all_reached("started") and host.failure == ""
    assert strangers <= 512 + 9, (seconds, strangers)
    host.close()


def test_a_flood_closes_no_authenticated_connection() -> None:
    """Authenticated connections stay open, however many others connect from the same address."""
    world = World("slurm", 0, 3, 0, 1, 0, (), HERE, free_ports(4), "77.0.0")
    host = open_server(world)
    one = open_client(world, 1)
    with contextlib.ExitStack() as stack:
        for _ in range(900):
            stack.enter_context(socket.create_connection((HERE, host.port)))
        deadline = time.monotonic() + 10
        while len(host._connections._unauthenticated) < 250 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert 250 <= len(host._connections._unauthenticated) <= 260
        assert open_client(world, 2).failure == "" and one.failure == "" and host.failure == ""


def test_the_port_of_the_store_is_taken_before_it_is_sent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When rank 0 sends the port of torch's store, another process can no longer listen there."""
    from hpcinit.rendezvous import store

    two = replace(world, world_size=2, hosts=("a", "b"))
    host, one = open_server(two), open_client(two, 1)
    tried: list[str] = []
    offer = host.offer_store

    def offered(port: int) -> None:
        try:
            socket.create_server((HERE, port)).close()
            tried.append("free")
        except OSError as error:
            tried.append(os.strerror(error.errno or 0))
        offer(port)

    monkeypatch.setattr(host, "offer_store", offered)
    for member in (host, one):
        member.report_phase("imported")
    deadline = time.monotonic() + 30
    found: list[object] = []
    rank_0 = threading.Thread(target=lambda: found.append(store.open_store(two, host, deadline)))
    rank_0.start()
    mine = store.open_store(replace(two, rank=1, node_rank=1), one, deadline)
    rank_0.join(30)
    mine.set("x", "1")
    assert found and tried == ["Address already in use"]
