"""Submissions exclude nodes that failed too often, and report it."""

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


def histories(*hosts: str) -> list[NodeHistory]:
    return [NodeHistory(host, tuple(NodeFailure(1.0, host, "ECC", job=job) for job in "12")) for host in hosts]


def decision(*hosts: str, sbatch: dict[str, Any] | None = None, words: tuple[str, ...] = ()) -> Exclusion:
    config = compose(["cluster=mini", *words])
    return decide(replace(config, cluster=replace(config.cluster, sbatch=sbatch or {})), histories(*hosts))


def test_a_dry_run_shows_excluded_nodes(hpcinit: Run, tmp_path: Path) -> None:
    """The note is not part of the script, and a node with one failure is not excluded."""
    table(tmp_path, ("n3", "NODE_FAIL"), ("n3", "Xid 79"), ("n1", "NODE_FAIL"))
    done = hpcinit(*MINI)
    assert "#SBATCH --exclude=n3\n" in done.stdout
    assert done.stderr == (
        "excluded: n3 (2 failures in 24 h: NODE_FAIL, Xid 79); to use it again: hpcinit nodes --forget n3\n"
    )


def test_the_keys(hpcinit: Run, tmp_path: Path) -> None:
    """The limit, the expiry and the switch change which nodes are excluded. The local engine excludes none."""
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


def test_in_addition_to_the_users_own() -> None:
    """sbatch gets both lists, and there is no note about a node that the user excludes."""
    assert decision("n2", sbatch={"exclude": "n[3-4]"}).hosts == "n[3-4],n2"
    assert decision("n3", sbatch={"exclude": "n[3-4]"}) == Exclusion(None, [])
    assert decision("n1", "n2").hosts == "n[1-2]"
    assert decision() == Exclusion(None)


def test_an_exclude_file_is_not_changed() -> None:
    """If the user excludes the nodes in a file, a warning names the node that is not excluded."""
    [said] = decision("n2", sbatch={"exclude": "./bad.txt"}).notes
    assert said == (
        "hpcinit: warning: n2 failed but is not excluded, because cluster.sbatch.exclude is the file ./bad.txt: add n2 to "
        "the file"
    )


def test_a_requested_node_is_not_excluded() -> None:
    """sbatch refuses a node that is both requested and excluded."""
    found = decision("n2", "n3", sbatch={"nodelist": "n[1-2]"})
    assert (
        found.hosts == "n3"
        and "n2 (2 failures in 24 h: ECC) is not excluded: cluster.sbatch.nodelist requests" in found.notes[0]
    )


def test_enough_nodes_remain() -> None:
    """If 3 of 4 nodes are requested, only the worst is excluded, with a warning about the others. Spare nodes count."""
    found = decision("n2", "n3", words=("nodes=3",))
    assert found.hosts == "n2" and found.notes[1] == (
        "hpcinit: warning: n3 (2 failures in 24 h: ECC) is not excluded: of the 4 nodes of the partition, the "
        "job requests 3, and 1 are already excluded"
    )
    assert decision("n2", words=("nodes=4",)).hosts is None
    assert decision("n2", words=("nodes=3", "spare_nodes=1")).hosts is None
    assert decision("n2", words=("nodes=3",), sbatch={"exclude": "n1"}).hosts is None
    assert decision("n2", "n3", words=("nodes=4", "partition=other")).hosts == "n[2-3]"  # a partition of unknown size


def lost_node_run(tmp_path: Path, name: str, job: str, **submission: object) -> Path:
    """Make a run whose second node was lost."""
    run = tmp_path / "runs" / name
    (run / "logs").mkdir(parents=True)
    record = {"job_id": job, "engine": "slurm", "cluster": "mini", **submission}
    (run / "submission.json").write_text(json.dumps(record))
    (run / "logs/job.log").write_text("srun: error: Node failure on n2\n")
    return run


def test_failures_of_recent_runs_count(hpcinit: Run, tmp_path: Path) -> None:
    """Tasks of a sweep count. Runs of another cluster, old runs and local runs do not. A dry run writes nothing."""
    lost_node_run(tmp_path, "a-0001", "1")
    (tmp_path / "runs/s-0001").mkdir()
    (tmp_path / "runs/s-0001/sweep.json").write_text("{}")
    for name, more in (("b-0001", {"cluster": "x"}), ("c-0001", {"engine": "local"}), ("d-0001", {"job_id": "1"})):
        lost_node_run(tmp_path, name, "9", **more)
    old = lost_node_run(tmp_path, "e-0001", "7")
    os.utime(old, (time.time() - 90000,) * 2)
    assert "--exclude" not in hpcinit(*MINI).stdout
    lost_node_run(tmp_path, "s-0001/3", "2_3")
    done = hpcinit(*MINI)
    assert "#SBATCH --exclude=n2\n" in done.stdout and not (tmp_path / TABLE).exists()


def test_an_unwritable_table_is_only_a_warning(hpcinit: Run, tmp_path: Path) -> None:
    """Nodes are excluded by the failures of the runs even if these cannot be recorded."""
    lost_node_run(tmp_path, "a-0001", "1"), lost_node_run(tmp_path, "a-0002", "2")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.local").write_text("a file")
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin/sbatch"  # a stand-in that prints the --exclude line and refuses
    sbatch.write_text('#!/bin/sh\nfor script; do :; done\ngrep exclude "$script" >&2\nexit 1\n')
    sbatch.chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = hpcinit("submit", "cluster=mini", "nodes=2", "again=true", "validate=false", env=env)
    assert "hpcinit: warning: cannot record node failures" in done.stderr and "--exclude=n2" in done.stderr


def test_the_table_is_shown_and_edited(hpcinit: Run, tmp_path: Path) -> None:
    """hpcinit nodes shows the failures, and --add and --forget change which nodes are excluded."""
    assert hpcinit("nodes").stdout.startswith("no node failure is recorded for the last 24 h")
    table(tmp_path, ("n3", "NODE_FAIL"), ("n3", "Xid 79"), ("n1", "ECC"))
    lines = hpcinit("nodes").stdout.splitlines()
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime((tmp_path / TABLE).stat().st_mtime - 60 + 24 * 3600))
    assert lines[0] == f"n3 of mini: 2 failures in 24 h: NODE_FAIL, Xid 79  (excluded from submissions until {until})"
    assert lines[1].endswith("  NODE_FAIL  job 0, /runs/x") and lines[3] == "n1 of mini: 1 failure in 24 h: ECC"
    found = [json.loads(line) for line in hpcinit("nodes", "--json").stdout.splitlines()]
    assert [(one["host"], one["excluded"], len(one["failures"])) for one in found] == [
        ("n3", True, 2),
        ("n1", False, 1),
    ]
    assert found[0]["until"] == found[0]["failures"][0]["time"] + 24 * 3600 and found[1]["until"] is None
    own = hpcinit("nodes", "cluster=mini", "excluded_nodes.limit=3").stdout.splitlines()
    assert own[0] == "n3 of mini: 2 failures in 24 h: NODE_FAIL, Xid 79", (
        "the same limit as a submission with these keys"
    )
    assert hpcinit("nodes", "cluster=local").stdout.startswith("no node failure is recorded")
    assert hpcinit("nodes", "--forget", "n3").stdout == "n3: failure history cleared\n"
    assert hpcinit("nodes", "--add", "n[1-2]", "--why", "slow network").returncode == 0
    done = hpcinit(*MINI)
    assert "#SBATCH --exclude='n[1-2]'\n" in done.stdout and "n2 (added manually: slow network)" in done.stderr
    shown = hpcinit("nodes").stdout
    assert "\nn2 of mini: added manually  (excluded from submissions until " in f"\n{shown}", shown
    assert shown.count("  added  slow network\n") == 2
    hpcinit("nodes", "--forget", "n[1-2]")
    assert "--exclude" not in hpcinit(*MINI).stdout
    hpcinit("nodes", "--add", "n2")
    assert "n2 (added manually: no reason given)" in hpcinit(*MINI).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--add", "n3"], "no cluster given, expected --cluster NAME; clusters with records: none"),
        (["--forget", "n9"], "no failure of n9 is recorded in "),
        (
            ["--forget", "n9", "--cluster", "x"],
            "no failure of n9 is recorded for cluster x; to list all: hpcinit nodes",
        ),
        (["--why", "x"], "--why 'x' needs --add: --add NODE --why TEXT"),
        (["n3"], "'n3' is not an override, expected KEY=VALUE, such as cluster=x or excluded_nodes.limit=3"),
        (["--add", "n[", "--cluster", "x"], "'[' without ']' at column 2 of the nodelist"),
    ],
)
def test_invalid_edits(hpcinit: Run, words: list[str], message: str) -> None:
    """Each invalid edit has its message and exit status 2."""
    done = hpcinit("nodes", *words)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


def test_render_ignores_excluded_nodes(hpcinit: Run, tmp_path: Path) -> None:
    """A different exclusion is not a change of the script, because it depends on the time of submission."""
    hpcinit("submit", "wait=true", "--", "true")
    script = tmp_path / "runs/true-0001/job.sh"
    script.write_text(script.read_text().replace("#SBATCH --nodes", "#SBATCH --exclude=n3\n#SBATCH --nodes", 1))
    assert hpcinit("render", "true-0001").returncode == 0
    assert "exclude" not in hpcinit("render", "true-0001", "time_min=7").stdout


@pytest.mark.slurm
@pytest.mark.parametrize("node", ["n2", "n1"])
def test_a_lost_node_is_excluded(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, node: str) -> None:
    """After kill_node and hpcinit why, the next submission excludes the node, although it is up again.

    n1 runs the batch script and cannot record its own loss, so Slurm is queried.
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
    assert (
        f"excluded: {node} (1 failure in 24 h: NODE_FAIL); to use it again: hpcinit nodes --forget {node}"
        in again.stderr
    )
    hosts = {path.read_text().split()[-1] for path in folder_of(again).glob("logs/rank-*.log")}
    assert again.returncode == 0 and hosts == {"n1", "n2", "n3", "n4"} - {node}
    assert len((tmp_path / TABLE).read_text().splitlines()) == 1  # the submission found the same failure again


@pytest.mark.slurm
def test_an_unknown_node(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """A node that Slurm does not have is not excluded, with a warning, because sbatch would refuse its name."""
    hpcinit("nodes", "--cluster", "mini", "--add", "ghost7,n4")
    done = hpcinit("submit", "cluster=mini", "ranks_per_node=1", "wait=true", "--", "true", env=idle_slurm.env)
    assert done.returncode == 0, done.stderr
    assert (
        "ghost7 failed but is not excluded: Slurm has no node of that name; to end this warning: hpcinit nodes"
        in done.stderr
    )
    assert (
        "excluded: n4 (added manually" in done.stderr and "--exclude=n4\n" in (folder_of(done) / "job.sh").read_text()
    )


@pytest.mark.slurm
def test_a_node_that_cannot_start_ranks(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """A node that dies between the start of the job and its ranks is named by srun and excluded by the next submission."""
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
    assert said.startswith("srun could not start the ranks on n2: slurmd did not answer there"), said
