"""The interface that a real NCCL takes, on virtual nodes with interfaces added, removed and renamed: make test-nccl.

NCCL needs no GPU and no driver for this. Each node of the cases is a network namespace. Two tests use the real Slurm.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from hpcinit.node import node_findings
from hpcinit.records.node_facts import Nccl
from hpcinit.records.run_folder import from_known_fields
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit

ROOT = Path(__file__).parents[2]
ASK = """
import json, os, sys
from dataclasses import asdict
from hpcinit.node import nccl_interface
print(json.dumps(asdict(nccl_interface.ask(os.environ, sys.argv[1], 60))))
"""


def link(name: str, *addresses: str) -> str:
    """Return shell lines that add an interface. A bridge, because every kernel has it; NCCL sees no difference."""
    added = [f"ip address add {address} dev {name}{' nodad' * (':' in address)}" for address in addresses]
    return "\n".join([f"ip link add {name} type bridge", *added, f"ip link set {name} up"])


def renamed(name: str, to: str) -> str:
    return f"ip link set {name} down; ip link set {name} name {to}; ip link set {to} up"


class Case(NamedTuple):
    """nodes: the shell lines that make the interfaces of n1, n2, ... found: parts of the finding, or nothing."""

    nodes: Sequence[str]
    env: Mapping[str, str] = MappingProxyType({})
    found: tuple[str, ...] = ()


DOCKER = link("docker0", "172.17.0.1/16")
ETH = [link("eth0", f"10.1.0.{number}/16") for number in (1, 2, 3)]
IB = [link("ib0", f"10.2.0.{number}/16") for number in (1, 2, 3)]

FAULTS = {
    "NCCL_SOCKET_IFNAME names no interface": Case(
        ETH[:2],
        {"NCCL_SOCKET_IFNAME": "ib7"},
        ("n1: NCCL fails with NCCL_SOCKET_IFNAME=ib7", "no socket interface found"),
    ),
    "the interface has another name on one node": Case(
        [ETH[0], f"{ETH[1]}\n{renamed('eth0', 'enp1s0')}", ETH[2]],
        {"NCCL_SOCKET_IFNAME": "eth0"},
        ("n2: NCCL fails with NCCL_SOCKET_IFNAME=eth0", "interfaces that are up: lo, enp1s0"),
    ),
    "only docker0 is left": Case(
        [ETH[0], f"{ETH[1]}\n{DOCKER}\nip link delete eth0"],
        found=("n2: NCCL uses docker0 (172.17.0.1)", "inside this node"),
    ),
    "a link-local address": Case(
        [ETH[0], f"{link('usb0', '169.254.3.1/16')}\n{ETH[1]}"],
        found=("n2: NCCL uses usb0 (169.254.3.1)", "link-local"),
    ),
    "InfiniBand on one node": Case(
        [ETH[0], f"{ETH[1]}\n{IB[1]}"],
        found=(
            "n2: NCCL uses ib0 (10.2.0.2), but on n1 it uses eth0 (10.1.0.1)",
            "n2 also has eth0 (10.1.0.2) in that network",
        ),
    ),
    "no interface is up": Case(
        [ETH[0], f"{ETH[1]}\nip link set eth0 down"], found=("n2: NCCL uses lo (127.0.0.1)", "no other node can reach")
    ),
    "two nodes have the same address": Case([ETH[0], ETH[0]], found=("n1, n2: NCCL uses the same address", "10.1.0.1")),
    "IPv6 on one node": Case(
        [ETH[0], link("eth0", "fd00:1::2/64")],
        found=("n2: NCCL uses eth0 (fd00:1::2)", "on n1 it uses eth0 (10.1.0.1)"),
    ),
    "two interfaces have each other's names": Case(
        [
            f"{ETH[0]}\n{link('eth1', '10.9.0.1/16')}",
            f"{link('eth0', '10.9.0.2/16')}\n{link('eth1', '10.1.0.2/16')}",
            f"{ETH[2]}\n{link('eth1', '10.9.0.3/16')}",
        ],
        found=("n2: NCCL uses eth0 (10.9.0.2)", "n2 also has eth1 (10.1.0.2) in that network"),
    ),
}

SOUND = {
    "one network": Case(ETH[:2]),
    "three nodes": Case(ETH),
    "docker0 after it": Case([f"{one}\n{DOCKER}" for one in ETH[:2]]),
    "docker0 before it": Case([f"{DOCKER}\n{one}" for one in ETH[:2]]),
    "docker0 on one node": Case([ETH[0], f"{DOCKER}\n{ETH[1]}"]),
    "InfiniBand on each": Case([f"{one}\n{other}" for one, other in zip(ETH[:2], IB[:2], strict=True)]),
    "InfiniBand in another order": Case([f"{ETH[0]}\n{IB[0]}", f"{IB[1]}\n{ETH[1]}"]),
    "four rails": Case(
        ["\n".join(link(f"ib{rail}", f"10.{2 + rail}.0.{number}/16") for rail in range(4)) for number in (1, 2)]
    ),
    "two names in one network": Case([ETH[0], f"{ETH[1]}\n{renamed('eth0', 'enp1s0')}"]),
    "a network per rack": Case([link("eth0", "10.1.1.1/24"), link("eth0", "10.1.2.1/24")]),
    "point to point": Case([link("eth0", "10.128.0.2/32"), link("eth0", "10.128.0.3/32")]),
    "other lengths of the prefix": Case([ETH[0], link("eth0", "10.1.0.2/24")]),
    "IPv6 only": Case([link("eth0", "fd00:1::1/64"), link("eth0", "fd00:1::2/64")]),
    "IPv4 and IPv6": Case([link("eth0", f"10.1.0.{n}/16", f"fd00:1::{n}/64") for n in (1, 2)]),
    "two addresses": Case([link("eth0", f"10.1.0.{n}/16", f"10.5.0.{n}/16") for n in (1, 2)]),
    "a prefix of the name": Case(ETH[:2], {"NCCL_SOCKET_IFNAME": "eth"}),
    "the exact name": Case(
        [f"{one}\n{other}" for one, other in zip(ETH, IB, strict=True)], {"NCCL_SOCKET_IFNAME": "=eth0"}
    ),
    "some names excluded": Case(ETH[:2], {"NCCL_SOCKET_IFNAME": "^docker,lo"}),
    "several names": Case(ETH[:2], {"NCCL_SOCKET_IFNAME": "ib0,eth0"}),
    "one family": Case(ETH[:2], {"NCCL_SOCKET_FAMILY": "AF_INET"}),
    "settings of the log": Case(ETH[:2], {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p"}),
    "a link-local interface after it": Case([f"{one}\n{link('usb0', '169.254.3.1/16')}" for one in ETH[:2]]),
    "one interface removed on each": Case(
        [f"{one}\n{link('eth1', f'10.9.0.{n}/16')}\nip link delete eth0" for n, one in ((1, ETH[0]), (2, ETH[1]))]
    ),
    "one node without a network": Case([""]),
}


def taken(case: Case) -> list[Nccl]:
    """Return what NCCL uses on each node of the case, each in a separate namespace."""

    def on(number: int, lines: str) -> Nccl:
        shell = f'set -e\nip link set lo up\n{lines}\nexec "$@"'
        command = ["unshare", "--net", "sh", "-c", shell, "sh", sys.executable, "-c", ASK, f"n{number}"]
        env = {**os.environ, **case.env, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        found = from_known_fields(Nccl, json.loads(done.stdout))
        return found

    with ThreadPoolExecutor() as pool:
        return list(pool.map(on, range(1, len(case.nodes) + 1), case.nodes))


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_named(name: str) -> None:
    """Each planted fault of the network is named with its node, and nothing else is reported."""
    case = FAULTS[name]
    found = list(node_findings.nccl_findings(taken(case), len(case.nodes)))
    assert {check.detail.partition(":")[0] for check in found} <= {"n1", "n2", "n1, n2"}
    assert len(found) == (2 if case.env.get("NCCL_SOCKET_IFNAME") == "ib7" else 1), found
    assert all(part in found[0].detail for part in case.found), found[0].detail
    assert found[0].advice


@pytest.mark.parametrize("name", list(SOUND))
def test_no_alarm_on_sound_nodes(name: str) -> None:
    """On sound nodes NCCL uses an interface on each, and nothing is reported."""
    case = SOUND[name]
    found = taken(case)
    assert all(one.interface and one.version for one in found)
    assert list(node_findings.nccl_findings(found, len(case.nodes))) == [], found


def test_the_time_it_takes() -> None:
    """The query of NCCL uses less processor time than the 2.5 s that the check of a node has for it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = sorted(taken(SOUND["one node without a network"])[0].seconds for _ in range(5))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 5
    print(f"\nNCCL was queried in {seconds[0]:.3f} to {seconds[-1]:.3f} s, with {used:.3f} s of processor time")
    assert used < 2.5


JOB = ("nodes=2", "ranks_per_node=1", "gpus_per_node=1", "check_node.timeout_s=150", "+cluster.sbatch.nodelist='n1,n2'")


@pytest.fixture
def infiniband_on_n2(idle_slurm: MiniSlurm) -> Iterator[MiniSlurm]:
    def on_n2(*command: str) -> None:
        subprocess.run(idle_slurm.inside("n2", command), check=True, capture_output=True)

    on_n2("sh", "-c", IB[1])
    yield idle_slurm
    on_n2("ip", "link", "delete", "ib0")


def printed_lines(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "logs").glob("rank-*.log"))


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_the_check_before_a_start(hpcinit: Run, infiniband_on_n2: MiniSlurm) -> None:
    """On a real Slurm, the check of each node reports a node that takes another network, and a wrong name; the ranks
    start nevertheless."""
    done = submit(hpcinit, infiniband_on_n2, *JOB, "wait=true", "--", "echo", "started", timeout=400)
    text = printed_lines(folder_of(done))
    assert done.returncode == 0 and text.count("started") == 2, done.stderr + text
    assert "NCCL uses ib0 (10.2.0.2), but on n1 it uses eth0" in text or (
        "NCCL uses eth0" in text and "but on n2 it uses ib0 (10.2.0.2)" in text
    ), text
    wrong = (*JOB, "+job.env.NCCL_SOCKET_IFNAME=ib7", "wait=true", "--", "echo", "started")
    done = submit(hpcinit, infiniband_on_n2, *wrong, timeout=400)
    text = printed_lines(folder_of(done))
    assert done.returncode == 0 and text.count("started") == 2, done.stderr + text
    for node in ("n1", "n2"):
        assert f"hpcinit: {node}: NCCL fails with NCCL_SOCKET_IFNAME=ib7: Bootstrap : no socket interface found" in text


@pytest.mark.slurm
@pytest.mark.timeout(1200)
def test_the_doctor(hpcinit: Run, infiniband_on_n2: MiniSlurm) -> None:
    """The doctor names the node that takes another network than the others."""
    words = ("doctor", "cluster=mini", "nodes=3", "ranks_per_node=1", "gpus_per_node=1", "-q")
    done = hpcinit(*words, env=infiniband_on_n2.env, timeout=900)
    found = [line for line in done.stdout.splitlines() if "NCCL's interface" in line]
    assert len(found) == 1 and found[0].startswith("fail     NCCL's interface: n2: NCCL uses ib0 (10.2.0.2)"), (
        done.stdout
    )
