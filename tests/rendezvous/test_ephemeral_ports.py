"""Rank 0's ports on a node whose kernel gives the usual candidates to outgoing connections."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.minislurm import MiniSlurm

CASES = ["32768 60999", "9000 65000", "1024 65535", "1024 65535 20000-32767"]
PROGRAM = """
import json, sys
from pathlib import Path
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.world import World, ports
ipv4 = Path("/proc/sys/net/ipv4")
before = (ipv4 / "ip_local_port_range").read_text()
try:
    for case in sys.argv[1:]:
        first, last, *reserved = case.split()
        (ipv4 / "ip_local_port_range").write_text(f"{first} {last}")
        (ipv4 / "ip_local_reserved_ports").write_text("".join(reserved) + "\\n")
        world = World("slurm", 0, 2, 0, 1, 0, ("a", "b"), "127.0.0.1", ports.candidate_ports("6.0.0"), "6.0.0")
        server = RendezvousServer(world, "127.0.0.1", "k", "j", {})
        print(json.dumps([server.port, server.program_port]), flush=True)
        server.close()
finally:
    (ipv4 / "ip_local_port_range").write_text(before)
    (ipv4 / "ip_local_reserved_ports").write_text("\\n")
"""


@pytest.mark.slurm
def test_rank_0_listens_outside_the_ephemeral_range_of_its_node(slurm: MiniSlurm) -> None:
    """On a node with 9000-65000 both ports are below 9000. If no candidate is outside the range, a warning shows the
    range and the setting that keeps ports free; with that setting the usual ports are used without a warning."""
    command = slurm.inside("n4", [sys.executable, "-c", PROGRAM, *CASES])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith("[")]
    usual, low, none_free, reserved = (json.loads(line) for line in printed)
    assert usual == [31753, 32762] == none_free == reserved, done.stdout
    assert all(5000 <= port < 9000 for port in low), done.stdout
    (warning,) = [line for line in (done.stdout + done.stderr).splitlines() if "warning" in line]
    assert "gives ports 1024-65535 to outgoing connections (net.ipv4.ip_local_port_range)" in warning
    assert "They include 11 of hpcinit's 11 ports" in warning
    assert warning.endswith("sysctl net.ipv4.ip_local_reserved_ports=20000-32767"), warning
