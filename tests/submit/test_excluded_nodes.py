"""What is submitted leaves out nodes that have failed too often, and says so."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcinit.config.compose import compose
from hpcinit.records import node_records
from hpcinit.records.node_records import NodeFailure, NodeHistory
from hpcinit.submit.excluded_nodes import Exclusion, decide
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit
from tests.waiting import until

TABLE = "home/.local/state/hpcinit/nodes/mini.jsonl"
MINI = ["submit", "cluster=mini", "nodes=2", "dry_run=true"]
TRAIN = """
import time
import torch, torch.distributed as dist
import hpcinit
run = hpcinit.init()
for step in range(100000):
    dist.all_reduce(torch.ones(1))
    run.progress(step, 100000)
    time.sleep(0.05)
"""


def table(tmp_path: Path, *failures: tuple[str, str]) -> None:
    now = time.time()
    lines = [NodeFailure(now - 60, host, kind, "/runs/x", str(at)) for at, (host, kind) in enumerate(failures)]
    node_records.append(tmp_path / TABLE, lines)


def standing(*hosts: str) -> list[NodeHistory]:
    return [NodeHistory(host, tuple(NodeFailure(1.0, host, "ECC", job=job) for job in "12")) for host in hosts]


def decided(*hosts: str, sbatch: dict[str, Any] | None = None, words: tuple[str, ...] = ()) -> Exclusion:
    config = compose(["cluster=mini", *words])
    return decide(replace(config, cluster=replace(config.cluster, sbatch=sbatch or {})), standing(*hosts))


def test_a_dry_run_shows_what_would_be_left_out(hpcinit: Run, tmp_path: Path) -> None:
    """The line that says so is no part of the script, and one failure is not too many."""
    table(tmp_path, ("n3", "NODE_FAIL"), ("n3", "Xid 79"), ("n1", "NODE_FAIL"))
    done = hpcinit(*MINI)
    assert "#SBATCH --exclude=n3\n" in done.stdout
    assert done.stderr == (
        "excluded: n3 (2 failures in 24 h: NODE_FAIL, Xid 79); hpcinit nodes --forget n3 takes it back\n"
    )


def test_the_keys(hpcinit: Run, tmp_path: Path) -> None:
    """Another limit, an expiry of a second, nothing left out at all; and the local engine has no such nodes."""
    table(tmp_path, ("n3", "NODE_FAIL"), ("n3", "Xid 79"))
    assert "--exclude" in hpcinit(*MINI).stdout
    for word in (
        "excluded_nodes.limit=3",
        "excluded_nodes.expiry_h=0.0001",
        "excluded_nodes.exclude=false",
        "cluster=local",
    ):
        done = hpcinit(*MINI, word) if "local" not in word else hpcinit("submit", "dry_run=true")
        assert (done.returncode, done.stderr) == (0, "") and "--exclude" not in done.stdout
    done = hpcinit(*MINI, "excluded_nodes.limit=0", "excluded_nodes.expiry_h=0")
    assert "excluded_nodes.limit is 0, expected 1 or more" in done.stderr
    assert "excluded_nodes.expiry_h is 0, expected more than 0" in done.stderr


def test_beside_the_users_own() -> None:
    """sbatch gets both; a node that is the user's own already is not told."""
    assert decided("n2", sbatch={"exclude": "n[3-4]"}).hosts == "n[3-4],n2"
    assert decided("n3", sbatch={"exclude": "n[3-4]"}) == Exclusion(None, [])
    assert decided("n1", "n2").hosts == "n[1-2]"
    assert decided() == Exclusion(None)


def test_a_file_of_the_users_cannot_be_added_to() -> None:
    [said] = decided("n2", sbatch={"exclude": "./bad.txt"}).said
    assert said == "hpcinit: warning: n2 failed, and only what ./bad.txt has is excluded"


def test_a_node_that_is_asked_for_stays() -> None:
    """sbatch refuses what is asked for and excluded."""
    found = decided("n2", "n3", sbatch={"nodelist": "n[1-2]"})
    assert (
        found.hosts == "n3" and "n2 (2 failures in 24 h: ECC) is bad, and cluster.sbatch.nodelist asks" in found.said[0]
    )


def test_never_so_many_that_the_request_cannot_run() -> None:
    """Of 4 nodes 3 are wanted: the worst is left out and the others are warned of; a spare counts."""
    found = decided("n2", "n3", words=("nodes=3",))
    assert found.hosts == "n2" and found.said[1] == (
        "hpcinit: warning: n3 (2 failures in 24 h: ECC) is bad, and not excluded: of the 4 nodes in the partition 3 "
        "are asked for and 1 excluded"
    )
    assert decided("n2", words=("nodes=4",)).hosts is None
    assert decided("n2", words=("nodes=3", "spare_nodes=1")).hosts is None
    assert decided("n2", words=("nodes=3",), sbatch={"exclude": "n1"}).hosts is None
    assert decided("n2", "n3", words=("nodes=4", "partition=other")).hosts == "n[2-3]"  # its size is not known


def left(tmp_path: Path, name: str, job: str, **submission: object) -> Path:
    """A run as it is after its second node was lost."""
    run = tmp_path / "runs" / name
    (run / "logs").mkdir(parents=True)
    record = {"job_id": job, "engine": "slurm", "cluster": "mini", **submission}
    (run / "submission.json").write_text(json.dumps(record))
    (run / "logs/job.log").write_text("srun: error: Node failure on n2\n")
    return run


def test_runs_that_have_ended_since_are_looked_at(hpcinit: Run, tmp_path: Path) -> None:
    """Also tasks of a sweep; no run of another cluster, an older one, or one without Slurm. A dry run keeps nothing."""
    left(tmp_path, "a-0001", "1")
    (tmp_path / "runs/s-0001").mkdir()
    (tmp_path / "runs/s-0001/sweep.json").write_text("{}")
    for name, more in (("b-0001", {"cluster": "x"}), ("c-0001", {"engine": "local"}), ("d-0001", {"job_id": "1"})):
        left(tmp_path, name, "9", **more)
    old = left(tmp_path, "e-0001", "7")
    os.utime(old, (time.time() - 90000,) * 2)
    assert "--exclude" not in hpcinit(*MINI).stdout
    left(tmp_path, "s-0001/3", "2_3")
    done = hpcinit(*MINI)
    assert "#SBATCH --exclude=n2\n" in done.stdout and not (tmp_path / TABLE).exists()


def test_a_table_that_cannot_be_written_stops_nothing(hpcinit: Run, tmp_path: Path) -> None:
    """What the runs tell is left out all the same."""
    left(tmp_path, "a-0001", "1"), left(tmp_path, "a-0002", "2")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.local").write_text("a file")
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin/sbatch"  # a stand-in: it refuses, and tells the line that it was given
    sbatch.write_text('#!/bin/sh\nfor word; do :; done\ngrep exclude "$word" >&2\nexit 1\n')
    sbatch.chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = hpcinit("submit", "cluster=mini", "nodes=2", "again=true", "test_only=false", env=env)
    assert "hpcinit: warning: failures of nodes are not kept" in done.stderr and "--exclude=n2" in done.stderr


def test_the_table_is_shown_and_edited(hpcinit: Run, tmp_path: Path) -> None:
    assert hpcinit("nodes").stdout.startswith("no node has failed in the last 24 h")
    table(tmp_path, ("n3", "NODE_FAIL"), ("n3", "Xid 79"), ("n1", "ECC"))
    lines = hpcinit("nodes").stdout.splitlines()
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime((tmp_path / TABLE).stat().st_mtime - 60 + 24 * 3600))
    assert lines[0] == f"n3 of mini: 2 failures in 24 h: NODE_FAIL, Xid 79  (left out of submissions until {until})"
    assert lines[1].endswith("  NODE_FAIL  job 0, /runs/x") and lines[3] == "n1 of mini: 1 failure in 24 h: ECC"
    found = [json.loads(line) for line in hpcinit("nodes", "--json").stdout.splitlines()]
    assert [(one["host"], one["excluded"], len(one["failures"])) for one in found] == [
        ("n3", True, 2),
        ("n1", False, 1),
    ]
    assert found[0]["until"] == found[0]["failures"][0]["time"] + 24 * 3600 and found[1]["until"] is None
    own = hpcinit("nodes", "cluster=mini", "excluded_nodes.limit=3").stdout.splitlines()
    assert own[0] == "n3 of mini: 2 failures in 24 h: NODE_FAIL, Xid 79", "as a submission with these words has it"
    assert hpcinit("nodes", "cluster=local").stdout.startswith("no node has failed")
    assert hpcinit("nodes", "--forget", "n3").stdout == "n3: what was until now no longer counts\n"
    assert hpcinit("nodes", "--add", "n[1-2]", "--why", "slow network").returncode == 0
    done = hpcinit(*MINI)
    assert "#SBATCH --exclude='n[1-2]'\n" in done.stdout and "n2 (added by hand: slow network)" in done.stderr
    shown = hpcinit("nodes").stdout
    assert "\nn2 of mini: added by hand  (left out of submissions until " in f"\n{shown}", shown
    assert shown.count("  added  slow network\n") == 2
    hpcinit("nodes", "--forget", "n[1-2]")
    assert "--exclude" not in hpcinit(*MINI).stdout
    hpcinit("nodes", "--add", "n2")
    assert "n2 (added by hand: no reason given)" in hpcinit(*MINI).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--add", "n3"], "which cluster's nodes? The tables that there are: none; give --cluster NAME"),
        (["--forget", "n9"], "no failure of n9 is known in "),
        (["--forget", "n9", "--cluster", "x"], "no failure of n9 is known of cluster x: hpcinit nodes shows"),
        (["--why", "x"], "--why 'x' stands alone, expected --add NODE --why TEXT"),
        (["--limit", "0"], "--limit is 0 and --expiry-h 24, expected 1 or more, and more than 0"),
        (["n3"], "'n3' is no override, expected cluster=x, excluded_nodes.limit=3 and the like"),
        (["--add", "n[", "--cluster", "x"], "'[' without ']' at column 2 of the nodelist"),
    ],
)
def test_what_cannot_be_edited(hpcinit: Run, words: list[str], message: str) -> None:
    done = hpcinit("nodes", *words)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


def test_render_does_not_take_an_excluded_node_for_a_change(hpcinit: Run, tmp_path: Path) -> None:
    """The nodes left out belong to the moment of submission."""
    hpcinit("submit", "wait=true", "--", "true")
    script = tmp_path / "runs/true-0001/job.sh"
    script.write_text(script.read_text().replace("#SBATCH --nodes", "#SBATCH --exclude=n3\n#SBATCH --nodes", 1))
    assert hpcinit("render", "true-0001").returncode == 0
    assert "exclude" not in hpcinit("render", "true-0001", "time_min=7").stdout


@pytest.mark.slurm
@pytest.mark.parametrize("node", ["n2", "n1"])
def test_a_node_that_was_lost_is_left_out(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, node: str) -> None:
    """kill_node, then hpcinit why: the next submission says so and runs elsewhere, though the node is up again.

    n1 runs the batch script, and with it goes whoever could write down which node it was: Slurm is asked.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["ranks_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "excluded_nodes.limit=1"]
    done = submit(hpcinit, idle_slurm, "nodes=2", *words, "+cluster.sbatch.no-requeue=true", "--", "train.py")
    folder = folder_of(done)
    until((folder / "progress.json").exists)
    idle_slurm.kill_node(node)
    job = json.loads((folder / "submission.json").read_text())["job_id"]
    shown = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
    try:
        idle_slurm.give_up(node)
        until(lambda: idle_slurm.run(*shown).strip() == "NODE_FAIL")
        assert f"node {node} was lost" in hpcinit("why", folder.name, env=idle_slurm.env).stdout
    finally:
        idle_slurm.start_node(node)
    idle_slurm.wait_idle()
    [line] = (tmp_path / TABLE).read_text().splitlines()
    found = json.loads(line)
    assert (found["host"], found["kind"], found["job"]) == (node, "NODE_FAIL", job)
    again = submit(hpcinit, idle_slurm, "nodes=3", *words, "wait=true", "--", "sh", "-c", "hostname")
    assert f"excluded: {node} (1 failure in 24 h: NODE_FAIL); hpcinit nodes --forget {node} takes it" in again.stderr
    hosts = {path.read_text().split()[-1] for path in folder_of(again).glob("logs/rank-*.log")}
    assert again.returncode == 0 and hosts == {"n1", "n2", "n3", "n4"} - {node}
    assert len((tmp_path / TABLE).read_text().splitlines()) == 1  # the submission has found the same failure again


@pytest.mark.slurm
def test_a_node_that_slurm_does_not_know(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """sbatch would refuse its name ever again: it is not excluded, and that is said."""
    hpcinit("nodes", "--cluster", "mini", "--add", "ghost7,n4")
    done = hpcinit("submit", "cluster=mini", "ranks_per_node=1", "wait=true", "--", "true", env=idle_slurm.env)
    assert done.returncode == 0, done.stderr
    assert "ghost7 failed, and Slurm has no node of that name: not excluded; hpcinit nodes --forget" in done.stderr
    assert "excluded: n4 (added by hand" in done.stderr and "--exclude=n4\n" in (folder_of(done) / "job.sh").read_text()


@pytest.mark.slurm
def test_a_node_on_which_no_rank_can_be_started(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """It dies after the job has begun and before its ranks: srun names it, and the next submission has read that."""
    words = ["ranks_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "excluded_nodes.limit=1"]
    words += ["+cluster.sbatch.no-requeue=true", "cluster.setup=[sleep 5]"]
    folder = folder_of(submit(hpcinit, idle_slurm, "nodes=2", *words, "--", "sleep", "60"))
    until((folder / "exit.json").exists)
    idle_slurm.kill_node("n2")
    try:
        until(lambda: "exit_status" in (folder / "exit.json").read_text())
    finally:
        idle_slurm.start_node("n2")
    done = hpcinit("submit", "cluster=mini", *words, "dry_run=true", "again=true", env=idle_slurm.env)
    assert "excluded: n2 (1 failure in 24 h: slurmd unreachable)" in done.stderr
    said = hpcinit("why", folder.name, env=idle_slurm.env).stdout
    assert said.startswith("srun could not start the ranks on n2: its slurmd gave no answer"), said
