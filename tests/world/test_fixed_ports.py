"""`comm.ports`: the ports of the rendezvous, of torch's store and of MASTER_PORT that a site's firewall allows."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.base.errors import BringUpError, WorldError
from hpcinit.checks import all_checks
from hpcinit.config.compose import compose
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.world import World, launchers, ports, rank_0
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, printed, submit

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_GTIDS": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2", "SLURM_UMASK": "0022",
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("29500", ""), ("20000-20002", ""), ("env", ""),
        ("20000-20001", "is '20000-20001' (2 ports), expected 3 or more: for the rendezvous, torch's store and"),
        ("80", "is '80', expected ports from 1024 to 65535, the lower one first"),
        ("20100-20000", "is '20100-20000', expected ports from 1024 to 65535, the lower one first"),
        ("65535", "is '65535', expected ports from 1024 to 65535"),
        ("ssh", "is 'ssh', expected a port, as in 29500, a range of 3 or more, as in 20000-20100, or env"),
    ],
)  # fmt: skip
def test_values_are_checked_before_submission(value: str, reason: str) -> None:
    """A port, a range of three or more, or env; a value of another form is an error on the login node."""
    found = all_checks.problems(compose([f"comm.ports='{value}'"]), to_submit=False)
    assert [text.startswith(f"comm.ports {reason}") for text in found] == [True] * bool(reason)


def test_torchrun_needs_a_range() -> None:
    """torchrun's agents have their own rendezvous and store, so three ports are too few."""
    (found,) = all_checks.problems(compose(["comm.ports=29500", "launch=torchrun"]), to_submit=False)
    assert found.startswith("comm.ports is '29500', expected a range") and "launch=torchrun" in found
    assert not all_checks.problems(compose(["comm.ports=20000-20100", "launch=torchrun"]), to_submit=False)


def test_all_ranks_compute_the_same_ports() -> None:
    """A range gives eight ports that depend on the job, one port gives itself as MASTER_PORT and the next two."""
    many = launchers.read(STEP | {"HPCINIT_PORTS": "20000-20100"}).master_ports
    assert len(many) == 8 and all(20000 <= port <= 20100 for port in many)
    assert many == launchers.read(STEP | {"HPCINIT_PORTS": "20000-20100", "SLURM_PROCID": "1"}).master_ports
    assert launchers.read(STEP | {"HPCINIT_PORTS": "29500"}).master_ports == (29501, 29500, 29502)
    with pytest.raises(WorldError, match=r"HPCINIT_PORTS is 'x', expected a port, .*comm.ports in the config sets it"):
        launchers.read(STEP | {"HPCINIT_PORTS": "x"})


def test_the_users_own_address_and_port() -> None:
    """With env the job's own MASTER_ADDR and MASTER_PORT are used without a warning; without it they are ignored."""
    own = {"MASTER_ADDR": "n1-ib0", "MASTER_PORT": "29500"}
    world = launchers.read(STEP | own | {"HPCINIT_PORTS": "env"})
    assert (world.master_addr, world.master_ports, world.warnings) == ("n1-ib0", (29501, 29500, 29502), ())
    assert "MASTER_PORT is 29500, the port is " in launchers.read(STEP | own).warnings[0]
    with pytest.raises(WorldError, match=r"MASTER_PORT is not set, expected a number: HPCINIT_PORTS=env \(comm.ports"):
        launchers.read(STEP | {"HPCINIT_PORTS": "env"})


def three_free() -> int:
    """Return the first of three consecutive ports that are free now."""
    for port in range(21000, 32000, 3):
        try:
            for offset in range(3):
                socket.create_server(("127.0.0.1", port + offset)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no three free ports")


def test_rank_0_uses_only_these_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous, MASTER_PORT and the store are the three ports. If one is in use, the error names all three."""
    first = three_free()
    monkeypatch.setenv("HPCINIT_PORTS", str(first))
    world = World("slurm", 0, 2, 0, 1, 0, ("a", "b"), "127.0.0.1", ports.candidates(str(first), "7.0"), "7.0")
    server = RendezvousServer(world, "127.0.0.1", "k", "j", {})
    try:
        with server.listen_for_store() as store:
            assert (server.port, server.program_port, store.getsockname()[1]) == (first + 1, first, first + 2)
        with (
            socket.create_server(("127.0.0.1", first + 2)),
            pytest.raises(BringUpError, match=rf"no free port for torch's store .*{first + 2}: Address already in use"),
        ):
            server.listen_for_store()
    finally:
        server.close()


def test_a_master_addr_of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reports a MASTER_ADDR that is not its own, with the address seen and the host expected."""
    monkeypatch.setenv("HPCINIT_PORTS", "env")
    monkeypatch.setenv("MASTER_ADDR", "198.51.100.7")
    monkeypatch.delenv("HPCINIT_RUN", raising=False)
    world = World("slurm", 0, 2, 0, 1, 0, ("a", "b"), "198.51.100.7", (29501, 29500, 29502), "7.0")
    with pytest.raises(BringUpError, match=r"MASTER_ADDR is 198.51.100.7, which resolves to 198.51.100.7, expected an"):
        rank_0.check_master_addr(world)
    rank_0.check_master_addr(replace(world, master_addr="localhost"))


PROGRAM = """
import os, hpcinit, torch
run = hpcinit.init()
value = torch.ones(1); torch.distributed.all_reduce(value)
ports = set()
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for row in open(table).read().splitlines()[1:]:
        _, local, _, state, *_ = row.split()
        if state == "0A":
            ports.add(int(local.rpartition(":")[2], 16))
print(value.item(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], sorted(ports & set(range(20500, 20600))))
torch.distributed.barrier()
"""


def result(folder: Path, rank: int) -> str:
    """Return the program's line, without torch's warnings."""
    (line,) = [line for line in printed(folder, rank).splitlines() if line.startswith("2.0 ")]
    return line


@pytest.mark.slurm
def test_on_slurm(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """On two nodes, rank 0's node listens only on ports of the range; the user's own values are used with env."""
    (tmp_path / "train.py").write_text(PROGRAM)
    both = ("nodes=2", "ranks_per_node=1", "wait=true")
    done = submit(hpcinit, idle_slurm, *both, "comm.ports=20500-20599", "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    total, host, port, listening = result(folder_of(done), 0).split(" ", 3)
    assert (total, host) == ("2.0", "n1") and 20500 <= int(port) < 20600
    assert len(json.loads(listening)) == 1  # torch's store
    own = ("comm.ports=env", "+job.env.MASTER_PORT='20550'", "+job.env.MASTER_ADDR=" + idle_slurm.address("n1"))
    done = submit(hpcinit, idle_slurm, *both, *own, "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result(folder_of(done), 1).startswith(f"2.0 {idle_slurm.address('n1')} 20550 ")
    done = submit(hpcinit, idle_slurm, *both, *own[:2], "+job.env.MASTER_ADDR=n2", "--", sys.executable, "train.py")
    log = (folder_of(done) / "logs/rank-0.log").read_text()
    assert (
        done.returncode != 0 and f"MASTER_ADDR is n2, which resolves to {idle_slurm.address('n2')}, expected an" in log
    )
