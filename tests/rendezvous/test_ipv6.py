"""Ranks on nodes that have only IPv6 addresses, or both kinds: two network namespaces with a cable between them.

Slurm itself is not involved: its own connections use IPv4 in the test cluster. The ranks get the variables of a step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.minislurm import network
from tests.minislurm.shell import PATH

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]  # as the clusters, it needs root and namespaces

SIX = {"n1": "fd00:5e::1", "n2": "fd00:5e::2"}
FOUR = {"n1": "198.51.100.1", "n2": "198.51.100.2"}
PROGRAM = """
import json, socket, sys
import torch, torch.distributed as dist
import hpcinit
from hpcinit.runtime import process_state
found = {}
run = hpcinit.init()
place = process_state.state.rendezvous
found["rank 0 at"] = place.address if place else None
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(32.0).reshape(8, 4) / 32
mine = data[run.world.rank :: 2]
for _ in range(3):
    optimizer.zero_grad()
    loss = (model(mine) - 1).square().mean()
    loss.backward()
    optimizer.step()
weight = next(model.parameters()).detach().clone()
others = [torch.empty_like(weight) for _ in range(2)]
dist.all_gather(others, weight)
found["equal"] = bool(torch.equal(*others)) and not torch.equal(weight, torch.zeros_like(weight))
families = set()
for table in ("tcp", "tcp6"):
    for row in open(f"/proc/net/{table}").read().splitlines()[1:]:
        if row.split()[3] == "01":
            families.add(table)
found["families"] = sorted(families)
print(json.dumps(found), flush=True)
dist.barrier()
"""


@contextmanager
def nodes(tmp_path: Path, addresses: dict[str, list[str]], hosts: dict[str, list[str]]) -> Iterator[dict[str, int]]:
    """Make n1 and n2 with these addresses and this /etc/hosts; yield a process id of each."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, held in hosts.items() for ip in held))
    pids: dict[str, int] = {}
    try:
        for name in addresses:
            pids[name] = network.hold(f"ipv6-{os.getpid()}", name, file)
        network._in_namespace(pids["n1"], f"link add eth0 type veth peer name eth0 netns {pids['n2']}\n")
        for name, held in addresses.items():
            lines = [
                f"address add {ip}/64 dev eth0 nodad" if ":" in ip else f"address add {ip}/24 dev eth0" for ip in held
            ]
            network._in_namespace(pids[name], "\n".join([*lines, "link set eth0 up", ""]))
        yield pids
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)


def train(tmp_path: Path, pids: dict[str, int]) -> list[dict[str, object]]:
    """Train on both nodes, and return what each rank prints."""
    (tmp_path / "train.py").write_text(PROGRAM)
    ranks = []
    for rank, (name, pid) in enumerate(pids.items()):
        step = {
            "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": rank, "SLURM_LOCALID": 0, "SLURM_NODEID": rank, "SLURM_GTIDS": rank, "SLURM_UMASK": "0022",
            "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": name,
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        }  # fmt: skip
        env = {**os.environ, **{key: str(value) for key, value in step.items()}, "HPCINIT_NONCE": "ipv6", "PATH": PATH}
        env["HPCINIT_STARTED_BY"] = "slurm"
        inside = ["nsenter", "--target", str(pid), "--net", "--uts", "--mount", f"--wd={tmp_path}"]
        command = [*inside, sys.executable, "-m", "hpcinit.run", "train.py"]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        shown = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n\n".join(shown)
    return [json.loads(text[text.index('{"rank 0 at"') :].splitlines()[0]) for text in shown]


def test_only_ipv6(tmp_path: Path) -> None:
    """Rendezvous, store, gloo and training on nodes without any IPv4 address but loopback."""
    only = {name: [ip] for name, ip in SIX.items()}
    with nodes(tmp_path, only, only) as pids:
        for found in train(tmp_path, pids):
            assert found == {"rank 0 at": SIX["n1"], "equal": True, "families": ["tcp6"]}


def test_both_kinds(tmp_path: Path) -> None:
    """With both kinds everywhere, IPv4 is used."""
    both = {name: [SIX[name], FOUR[name]] for name in SIX}
    with nodes(tmp_path, both, both) as pids:
        for found in train(tmp_path, pids):
            assert (found["rank 0 at"], found["equal"]) == (FOUR["n1"], True)


def test_names_with_an_ipv4_address_that_no_node_has(tmp_path: Path) -> None:
    """DNS may still have the IPv4 addresses of nodes that now have only IPv6: the ranks find rank 0 at the other one."""
    only, both = {name: [ip] for name, ip in SIX.items()}, {name: [FOUR[name], SIX[name]] for name in SIX}
    with nodes(tmp_path, only, both) as pids:
        for found in train(tmp_path, pids):
            assert (found["rank 0 at"], found["equal"]) == (SIX["n1"], True)
