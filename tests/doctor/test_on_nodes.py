"""hpcinit doctor on the nodes of a real cluster: healthy nodes, faulty nodes, and a node that does not start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcinit.doctor import doctor_command
from hpcinit.records.check_results import FAIL, OK, Check
from tests import json_documents
from tests.conftest import Run
from tests.minislurm import MiniSlurm

MINI = ("doctor", "cluster=mini", "cluster.gpu_flag=null")  # request no GPUs: torch finds none here
SECONDS = 900  # enough for a busy machine
LINK = ("dev", "eth0", "root")


def named(document: dict[str, Any], about: str) -> list[dict[str, Any]]:
    return [check for check in document["checks"] if check["about"] == about]


@pytest.mark.slurm
@pytest.mark.timeout(1200)
def test_two_healthy_nodes(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """On 2 nodes x 2 ranks no check fails; --json prints one object with all reports, the submission's output goes to
    stderr, and --run shows the results again."""
    arguments = (*MINI, "nodes=2", "ranks_per_node=2", "--json")
    done = hpcinit(*arguments, env=idle_slurm.env, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    [document] = json_documents.parse(done.stdout, "doctor")
    assert "run folder: " in done.stderr and document["cluster"] == "mini" and document["job_id"]
    assert [check for check in document["checks"] if check["status"] == FAIL] == []
    assert named(document, "ranks")[0]["detail"] == "4 on 2 nodes connected and finished all measurements"
    assert [(rank["rank"], rank["host"], rank["stage"]) for rank in document["ranks"]] == [
        (0, "n1", "measured"),
        (1, "n1", "measured"),
        (2, "n2", "measured"),
        (3, "n2", "measured"),
    ]
    links = [(link["a"], link["b"], link["between_nodes"]) for rank in document["ranks"] for link in rank["links"]]
    assert sorted(links) == [(0, 1, False), (0, 2, True), (1, 3, True), (2, 3, False)]
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
        assert named(document, about)[0]["status"] == OK, about
    again = hpcinit("doctor", "--run", document["job_id"])
    assert again.returncode == 0 and "all-reduce     1 KiB " in again.stdout


@pytest.fixture
def faulty(idle_slurm: MiniSlurm, tmp_path: Path) -> Iterator[MiniSlurm]:
    """Yield a cluster where n3 sends at most 10 MB/s, and n2 has no shared memory left and cannot resolve n3.

    tbf slows n3 down, because not every kernel has netem's delay.
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
def test_faulty_nodes(hpcinit: Run, faulty: MiniSlurm) -> None:
    """Only the slow network, the full shared memory and the name that does not resolve fail; --remember excludes both
    nodes from the next submission."""
    done = hpcinit(*MINI, "nodes=3", "ranks_per_node=1", "--remember", "-q", env=faulty.env, timeout=SECONDS)
    failed = [line for line in done.stdout.splitlines() if line.startswith("fail ")]
    assert done.returncode == 1 and len(failed) == 3, done.stdout + done.stderr
    assert failed[0].startswith("fail     names: n2 cannot resolve n3: ")
    assert failed[1].startswith("fail     shared memory: n2: /dev/shm, ")
    assert failed[2].startswith("fail     network: n3: its best link to another node is slow: bandwidth 0.0")
    assert done.stderr == ""
    again = hpcinit("doctor", "--run", "doctor-0001", "--remember", env=faulty.env)
    for host in ("n2", "n3"):
        assert f"{host} is excluded from submissions; to undo: hpcinit nodes --forget {host}" in again.stderr
    next_one = hpcinit("submit", "cluster=mini", "nodes=2", "dry_run=true", env=faulty.env)
    assert "#SBATCH --exclude='n[2-3]'\n" in next_one.stdout, next_one.stdout
    assert "excluded: n3 (found by hpcinit doctor: network: n3: its best link" in next_one.stderr
    assert hpcinit("nodes", "--forget", "n[2-3]").returncode == 0
    assert "--exclude" not in hpcinit("submit", "cluster=mini", "nodes=2", "dry_run=true", env=faulty.env).stdout


@pytest.mark.slurm
@pytest.mark.timeout(1200)
def test_a_node_that_does_not_start(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """A node that does not start is named along with the checks of the others; a drained one prevents the submission.

    The rank of n2 sleeps instead of starting Python, as if its file system hung.
    """
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$(hostname)" = n2 ] && [ -n "$SLURM_PROCID" ] && exec sleep 600\nexec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    arguments = (f"cluster.python={python}", "ranks_per_node=1", "comm.timeout_base_s=20", "comm.timeout_per_node_s=0")
    done = hpcinit(*MINI, "nodes=2", *arguments, "--json", env=idle_slurm.env, timeout=SECONDS)
    [document] = json_documents.parse(done.stdout, "doctor")
    lost, stuck = named(document, "ranks")
    assert done.returncode == 1 and [rank["host"] for rank in document["ranks"]] == ["n1"]
    assert (lost["detail"], lost["hosts"]) == ("n2: rank 1 did not start (no rank of the node did)", ["n2"])
    assert stuck["detail"] == "rank 0 stopped at stage 'begun'"
    assert named(document, "shared memory")[0]["status"] == OK  # of n1
    assert "n2" in named(document, "job")[0]["detail"], named(document, "job")
    assert "to exclude n2 from submissions:  hpcinit doctor --remember --run" in done.stderr
    idle_slurm.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=test")
    try:
        done = hpcinit(*MINI, "nodes=4", env=idle_slurm.env)
    finally:
        idle_slurm.run("scontrol", "update", "NodeName=n4", "State=RESUME")
    assert done.returncode == 1 and "usable: 3, requested: 4" in done.stdout
    assert "so the doctor's job was not submitted" in done.stderr


@pytest.mark.timeout(1200)
def test_without_slurm(hpcinit: Run, tmp_path: Path) -> None:
    """With cluster=local, --remember has no effect; --run takes no overrides."""
    done = hpcinit("doctor", "nodes=2", "ranks_per_node=1", "--remember", timeout=SECONDS)
    assert "ok       ranks: 2 on 2 nodes connected and finished all measurements" in done.stdout, (
        done.stdout + done.stderr
    )
    [run] = (tmp_path / "runs").glob("doctor-*")
    found = [Check("network", FAIL, "slow", hosts=("127.0.0.2",))]
    assert doctor_command.remember(run, found) == ["cluster local has no nodes to exclude, so --remember had no effect"]
    done = hpcinit("doctor", "--run", run.name, "nodes=3")
    assert done.returncode == 2 and "nodes=3 has no effect: remove it" in done.stderr
    done = hpcinit("doctor", "--remember")
    assert done.returncode == 2 and "--remember needs results from nodes" in done.stderr


def test_defaults_of_the_job() -> None:
    """The job is not restarted, and its time limit is 15 minutes unless the command line has another."""
    assert doctor_command.job_overrides(["nodes=2", "time_min=30"]) == [
        "restart.max_restarts=0",
        "nodes=2",
        "time_min=30",
        "wait=true",
        "job=doctor",
    ]
