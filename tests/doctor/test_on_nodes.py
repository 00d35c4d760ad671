"""hpcinit doctor on the nodes of a real cluster: one job that is well, one in which much is not, one without a node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcinit.base.errors import INTERRUPTED
from hpcinit.doctor import job_checks
from hpcinit.doctor.check_results import FAIL, OK, Check
from tests.conftest import Run
from tests.minislurm import MiniSlurm

MINI = ("doctor", "cluster=mini", "cluster.gpu_flag=null")  # torch finds no GPU here: Slurm gives none
SECONDS = 900  # of a machine that is busy otherwise
LINK = ("dev", "eth0", "root")


def named(document: dict[str, Any], about: str) -> list[dict[str, Any]]:
    return [check for check in document["checks"] if check["about"] == about]


@pytest.mark.slurm
@pytest.mark.timeout(1200)
def test_two_nodes_that_are_well(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """2 nodes x 2 ranks: all met and measured, nothing is bad; --json is one object with what each rank saw, what the
    submission says goes to stderr, and --run shows it again as a table."""
    words = (*MINI, "nodes=2", "ranks_per_node=2", "--json")
    done = hpcinit(*words, env=idle_slurm.env, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert "run folder: " in done.stderr and document["cluster"] == "mini" and document["job_id"]
    assert [check for check in document["checks"] if check["grade"] == FAIL] == []
    assert named(document, "ranks")[0]["said"] == "4 on 2 nodes have met and measured"
    assert [(rank["rank"], rank["host"], rank["stage"]) for rank in document["ranks"]] == [
        (0, "n1", "measured"),
        (1, "n1", "measured"),
        (2, "n2", "measured"),
        (3, "n2", "measured"),
    ]
    ways = [(link["a"], link["b"], link["between_nodes"]) for rank in document["ranks"] for link in rank["links"]]
    assert sorted(ways) == [(0, 1, False), (0, 2, True), (1, 3, True), (2, 3, False)]
    assert [one["size"] for one in document["all_reduce"]] == [1 << 10, 1 << 16, 1 << 20, 1 << 22]
    assert all(one["bus_gb_s"] > 0 for one in document["all_reduce"])
    for about in (
        "network",
        "inside nodes",
        "clocks",
        "store",
        "names",
        "interfaces",
        "shared memory",
        "memory",
        "job",
    ):
        assert named(document, about)[0]["grade"] == OK, about
    again = hpcinit("doctor", "--run", document["job_id"])
    assert again.returncode == 0 and "all-reduce     1 KiB " in again.stdout and "\n0     n1    cpu " in again.stdout


@pytest.fixture
def ill(idle_slurm: MiniSlurm, tmp_path: Path) -> Iterator[MiniSlurm]:
    """n3 sends 10 MB/s at most, n2 has no shared memory left and knows no n3.

    By tbf in the place of netem's delay, which not every kernel has.
    """
    hosts = [line for line in (idle_slurm.directory / "etc/hosts").read_text().splitlines() if "n3" not in line.split()]
    (tmp_path / "hosts").write_text("\n".join(hosts) + "\n")

    def on(node: str, *command: str) -> None:
        subprocess.run(idle_slurm.inside(node, command), check=True, capture_output=True)

    on("n3", *["tc", "qdisc", "add", *LINK, "tbf", "rate", "80mbit", "burst", "64kb", "latency", "400ms"])
    on("n2", "mount", "-t", "tmpfs", "-o", "size=64k", "full", "/dev/shm")
    on("n2", "mount", "--bind", str(tmp_path / "hosts"), "/etc/hosts")
    try:
        yield idle_slurm
    finally:
        on("n3", *["tc", "qdisc", "del", *LINK])
        on("n2", "umount", "/dev/shm")
        on("n2", "umount", "/etc/hosts")


@pytest.mark.slurm
@pytest.mark.timeout(1200)
def test_nodes_that_are_ill(hpcinit: Run, ill: MiniSlurm) -> None:
    """The node whose network is slow, the one whose shared memory is full and the name that does not resolve are
    named, nothing else; with --remember both nodes are left out of the next submission."""
    done = hpcinit(*MINI, "nodes=3", "ranks_per_node=1", "--remember", "-q", env=ill.env, timeout=SECONDS)
    bad = [line for line in done.stdout.splitlines() if line.startswith("bad ")]
    assert done.returncode == 1 and len(bad) == 3, done.stdout + done.stderr
    assert bad[0].startswith("bad      names: n2 cannot look up n3: ")
    assert bad[1].startswith("bad      shared memory: n2: /dev/shm, ")
    assert bad[2].startswith("bad      network: n3: even its best way to another node is slow, bandwidth 0.0")
    assert done.stderr == ""
    again = hpcinit("doctor", "--run", "doctor-0001", "--remember", env=ill.env)
    for host in ("n2", "n3"):
        assert f"{host} is left out of submissions; hpcinit nodes --forget {host} takes it back" in again.stderr
    next_one = hpcinit("submit", "cluster=mini", "nodes=2", "dry_run=true", env=ill.env)
    assert "#SBATCH --exclude='n[2-3]'\n" in next_one.stdout, next_one.stdout
    assert "excluded: n3 (found by hpcinit doctor: network: n3: even its best way" in next_one.stderr
    assert hpcinit("nodes", "--forget", "n[2-3]").returncode == 0
    assert "--exclude" not in hpcinit("submit", "cluster=mini", "nodes=2", "dry_run=true", env=ill.env).stdout


@pytest.mark.slurm
@pytest.mark.timeout(1200)
def test_a_node_that_never_comes(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """It is named beside what the others have found; a drained one keeps the job from being submitted at all.

    The rank of n2 sleeps in the place of Python, like one whose file system hangs.
    """
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$(hostname)" = n2 ] && [ -n "$SLURM_PROCID" ] && exec sleep 600\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    words = (f"cluster.python={python}", "ranks_per_node=1", "comm.timeout_base_s=20", "comm.timeout_per_node_s=0")
    done = hpcinit(*MINI, "nodes=2", *words, "--json", env=idle_slurm.env, timeout=SECONDS)
    document = json.loads(done.stdout)
    lost, stuck = named(document, "ranks")
    assert done.returncode == 1 and [rank["host"] for rank in document["ranks"]] == ["n1"]
    assert (lost["said"], lost["hosts"]) == ("n2: rank 1 never began, none of the node's did", ["n2"])
    assert stuck["said"] == "rank 0 came no further than 'begun'"
    assert named(document, "shared memory")[0]["grade"] == OK  # of n1
    assert "n2" in named(document, "job")[0]["said"], named(document, "job")
    assert "leave n2 out from now on:  hpcinit doctor --remember --run" in done.stderr
    idle_slurm.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=test")
    try:
        done = hpcinit(*MINI, "nodes=4", env=idle_slurm.env)
    finally:
        idle_slurm.run("scontrol", "update", "NodeName=n4", "State=RESUME")
    assert done.returncode == 1 and "usable: 3, asked for: 4" in done.stdout
    assert "keeps the doctor's job from being submitted" in done.stderr


@pytest.mark.timeout(1200)
def test_without_slurm(hpcinit: Run, tmp_path: Path) -> None:
    """cluster=local plays the nodes; there it is no use to remember one, and an earlier run takes no overrides."""
    done = hpcinit("doctor", "nodes=2", "ranks_per_node=1", "--remember", timeout=SECONDS)
    assert "ok       ranks: 2 on 2 nodes have met and measured" in done.stdout, done.stdout + done.stderr
    [run] = (tmp_path / "runs").glob("doctor-*")
    blamed = [Check("network", FAIL, "slow", hosts=("127.0.0.2",))]
    assert job_checks.remember(run, blamed) == ["cluster local has no nodes to leave out: nothing is remembered"]
    done = hpcinit("doctor", "--run", run.name, "nodes=3")
    assert done.returncode == 2 and "nodes=3 changes nothing in it" in done.stderr
    done = hpcinit("doctor", "--remember")
    assert done.returncode == 2 and "--remember needs what the nodes say" in done.stderr


def test_no_longer_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C while the job waits: it goes on, and it is told how to see what it finds."""

    class Interrupted:
        def __init__(self, _: Path) -> None:
            pass

        def ask(self) -> bool:
            raise KeyboardInterrupt

    monkeypatch.setattr(job_checks, "Poll", Interrupted)
    assert job_checks.wait(tmp_path) == INTERRUPTED
    assert f"hpcinit doctor --run {tmp_path}" in capsys.readouterr().err


def test_what_it_asks_for() -> None:
    """A quarter of an hour, unless the command line says otherwise, and no requeueing."""
    assert job_checks.overrides(["nodes=2", "time_min=30"]) == [
        "restart.max_restarts=0",
        "nodes=2",
        "time_min=30",
        "job=doctor",
    ]
