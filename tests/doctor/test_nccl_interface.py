"""The interface that NCCL uses, without an NCCL: the lines of its log, the comparison of nodes, and their records.

tests/systems/test_nccl.py (`make test-nccl`) has the same with a real NCCL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.node import nccl_interface, node_check, node_findings
from hpcinit.records.check_results import FAIL
from hpcinit.records.node_facts import Address, Nccl

# Printed by NCCL 2.32.3 with NCCL_DEBUG=INFO; the others are in issues 857 and 367 of NVIDIA/nccl
LOGS = {
    "vm:25060:25060 [0] NCCL INFO Bootstrap: Using lo:127.0.0.1<0>\n": ("lo", "127.0.0.1"),
    "ai:480850:480850 [0] NCCL INFO Bootstrap : Using eth0:162.30.2.40<0>\n": ("eth0", "162.30.2.40"),
    "26a46eb2b1d3:111329:111329 [0] NCCL INFO Bootstrap : Using [0]eth0:172.17.0.2<0>\n": ("eth0", "172.17.0.2"),
    "vm:24500:24500 [0] NCCL INFO Bootstrap: Using e1:fe80::8414:1aff:fe43:d83e%e1<0>\n": (
        "e1",
        "fe80::8414:1aff:fe43:d83e",
    ),
    "vm:25308:25308 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ib7\n": ("", ""),
}


@pytest.mark.parametrize("log", list(LOGS))
def test_the_choice_is_read_from_the_log(log: str) -> None:
    """The interface and its address are read from the log of each version of NCCL."""
    assert nccl_interface._parse_choice(log) == LOGS[log]


def test_without_nccl_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU build of torch there is no NCCL, and no finding."""
    monkeypatch.setattr(nccl_interface, "LIBRARY", "libnccl-that-does-not-exist.so.2")
    assert nccl_interface.ask(os.environ, "n1", 60) is None


def test_nccl_is_queried_in_a_child_only() -> None:
    """Neither the check nor the probe loads NCCL into their own process."""
    code = (
        "import os; from hpcinit.node import nccl_interface, node_check, node_probe\n"
        "nccl_interface.ask(os.environ, 'n1', 60); print('libnccl' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("library", "error"),
    [
        ("import time\ntime.sleep(600)\n", "NCCL did not answer in 1.0 s"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "NCCL ended with status -11"),
    ],
)
def test_an_nccl_that_hangs_or_crashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, error: str
) -> None:
    """An NCCL that does not answer, or crashes, is reported as such. The child is a STAND-IN."""
    (tmp_path / "ask_nccl.py").write_text(library)
    monkeypatch.setattr(nccl_interface, "__file__", str(tmp_path / "nccl_interface.py"))
    found = nccl_interface.ask(os.environ, "n1", 1.0 if "sleep" in library else 60)
    assert found is not None and found.error == error


def test_when_nccl_is_used() -> None:
    """NCCL is queried for jobs with GPUs, unless the backend is another one."""
    gpus = {"SLURM_STEP_GPUS": "0"}
    assert nccl_interface.is_used(gpus, "auto") and nccl_interface.is_used({}, "cpu:gloo,cuda:nccl")
    assert not nccl_interface.is_used(gpus, "gloo") and not nccl_interface.is_used(gpus, "mpi")


def on(host: str, address: str, interface: str = "eth0", *others: Address) -> Nccl:
    return Nccl(host, interface, address, addresses=(Address(interface, address, 16), *others))


def test_nodes_are_compared() -> None:
    """A node that takes another network than most is named; racks with a network each are not."""
    usual = [on(f"n{number}", f"10.1.0.{number}") for number in (1, 2, 3)]
    other = on("n4", "10.2.0.4", "ib0", Address("eth0", "10.1.0.4", 16))
    [check] = node_findings.nccl_findings([*usual, other], 4)
    assert (check.status, check.hosts) == (FAIL, ("n4",))
    assert check.detail == (
        "n4: NCCL uses ib0 (10.2.0.4), but on n1 it uses eth0 (10.1.0.1), which is in another network; "
        "n4 also has eth0 (10.1.0.4) in that network"
    )
    rack = replace(other, addresses=(Address("ib0", "10.2.0.4", 16),))
    assert list(node_findings.nccl_findings([*usual, rack], 4)) == []
    # Two nodes differ: either may be the wrong one.
    [check] = node_findings.nccl_findings([usual[0], other], 2)
    assert check.hosts == ()


def test_a_wrong_setting_is_no_fault_of_the_nodes() -> None:
    """If NCCL fails on each node, the setting is wrong; if on one of three, that node is at fault."""
    failed = [Nccl(f"n{number}", error="no socket interface found", wanted="ib7") for number in (1, 2)]
    assert [check.hosts for check in node_findings.nccl_findings(failed, 2)] == [(), ()]
    sound = [on("n2", "10.1.0.2"), on("n3", "10.1.0.3")]
    assert [check.hosts for check in node_findings.nccl_findings([failed[0], *sound], 3)] == [("n1",)]


def test_of_two_nodes_one_sees_the_other(tmp_path: Path) -> None:
    """Each node writes its record before it reads, so the later one sees the other's. Another attempt's is ignored."""

    def env(node: str, restart: str = "0") -> dict[str, str]:
        step = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restart, "SLURM_STEP_NODELIST": "n[1-3]"}
        return {**step, "SLURMD_NODENAME": node, "HPCINIT_RUN": str(tmp_path)}

    first, second, third = on("n1", "10.1.0.1"), on("n2", "10.2.0.2"), on("n3", "10.1.0.3")
    assert node_check._of_other_nodes(second, env("n2")) == []
    assert node_check._of_other_nodes(first, env("n1")) == [second]
    assert node_check._of_other_nodes(third, env("n3")) == [first]
    assert node_check._of_other_nodes(third, env("n3", restart="1")) == []
    (tmp_path / "nccl/7.0.n2.json").write_text("{")
    assert node_check._of_other_nodes(first, env("n1")) == [third]
