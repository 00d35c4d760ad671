"""What another user of a node can do to the rendezvous: act as rank 0 without the secret, take the port of the store."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.world import World
from tests.rendezvous.test_rendezvous import HERE, free_ports, open_client, open_server

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def world() -> World:
    return World("slurm", 0, 3, 0, 1, 0, ("a", "b", "c"), HERE, free_ports(4), "77.0.0")


IMPOSTOR = """
import os, socket, sys, time
sys.path.insert(0, {root!r})
from hpcinit.rendezvous import protocol
os.setgid({gid})
os.setuid({uid})
key, job = {key!r}, {job!r}

def serve(connection):
    lines = protocol.Lines()
    hello = protocol.receive(connection, lines)[0]
    proof = protocol.proof(key, "server", hello["challenge"], job)
    mine = {{"hello": protocol.GREETING, "proof": proof, "challenge": "c", "key_id": protocol.key_id(key, job)}}
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


def test_the_port_of_the_store_is_taken_before_it_is_sent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When rank 0 sends the port of torch's store, another process can no longer listen there."""
    from hpcinit.runtime import torch_store

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
    rank_0 = threading.Thread(target=lambda: found.append(torch_store.open_store(two, host, deadline)))
    rank_0.start()
    mine = torch_store.open_store(replace(two, rank=1, node_rank=1), one, deadline)
    rank_0.join(30)
    mine.set("x", "1")
    assert found and tried == ["Address already in use"]
