"""Runs on another cluster of the same slurmdbd (cluster.clusters), with two real controllers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.slurm import slurm_client
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.submit.test_restart import begin_now
from tests.submitting import folder_of, job_of
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
SLEEP = ("--", "sleep", "600")
# sbatch submits the first job, and its reply is lost.
LOST = """#!/bin/sh
case "$*" in *--test-only*) exec {sbatch} "$@";; esac
echo "$@" >> {folder}/calls
[ -e {folder}/lost ] && exec {sbatch} "$@"
touch {folder}/lost
{sbatch} "$@" > {folder}/printed
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""

# It fails in the first attempt, and waits in the second one.
FAILING = """
import os, sys, time
from pathlib import Path
def wait_for_the_end(run):
    (run / "waits").touch()
    while not (run / "end").exists():
        time.sleep(0.1)
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    raise ValueError("bad sample 17")
wait_for_the_end(Path(os.environ["HPCINIT_RUN"]))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[MiniSlurm, MiniSlurm]]:
    """Start a cluster with slurmdbd, and a second one that uses it: the commands run on the first one's login node."""
    require_slurm(accounting=True)
    size = {"nodes": 1, "gpus": 0, "cpus": 4}
    here = MiniSlurm(**size, accounting=True, name=f"here-{os.getpid()}")
    with here, MiniSlurm(**size, name=f"there-{os.getpid()}", beside=here) as there:
        clusters = ("sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=cluster,controlhost")
        until(lambda: all(line.split("|")[1] for line in here.run(*clusters).splitlines()))
        yield here, there


@pytest.fixture
def clusters(pair: tuple[MiniSlurm, MiniSlurm]) -> Iterator[tuple[MiniSlurm, MiniSlurm]]:
    yield pair
    for cluster in pair:
        cluster.start_controller()
        cluster.cancel_all()


def submit(hpcinit: Run, here: MiniSlurm, *words: str, path: str | None = None) -> Path:
    env = here.env | ({"PATH": path} if path else {})
    done = hpcinit("submit", "cluster=mini", "gpus_per_node=0", "cpus_per_rank=1", *words, env=env)
    assert done.returncode == 0, done.stderr
    return folder_of(done)


def jobs_of(cluster: MiniSlurm) -> list[str]:
    return cluster.run("squeue", "--noheader", "--format=%A").split()


def states(hpcinit: Run, here: MiniSlurm, *runs: Path) -> list[dict[str, object]]:
    done = hpcinit("status", "--json", *(run.name for run in runs), env=here.env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def with_equal_ids(hpcinit: Run, clusters: tuple[MiniSlurm, MiniSlurm]) -> tuple[Path, Path]:
    """Return a run on each cluster, both with the same job id."""
    here, there = clusters
    mine = submit(hpcinit, here, "name=mine", *SLEEP)
    other = submit(hpcinit, here, "name=other", f"cluster.clusters={there.name}", *SLEEP)
    while job_of(mine) != job_of(other):
        behind, name = (here, "mine") if int(job_of(mine)) < int(job_of(other)) else (there, "other")
        where = [f"cluster.clusters={there.name}"] if behind is there else []
        behind.run("scancel", *jobs_of(behind))
        run = submit(hpcinit, here, f"name={name}", "again=true", *where, *SLEEP)
        mine, other = (run, other) if behind is here else (mine, run)
    return mine, other


def test_each_run_is_found_and_cancelled_on_its_cluster(hpcinit: Run, clusters: tuple[MiniSlurm, MiniSlurm]) -> None:
    """With the same job id on both clusters, status, exec and cancel use the right one."""
    here, there = clusters
    mine, other = with_equal_ids(hpcinit, clusters)
    assert f"#SBATCH --clusters={there.name}\n" in (other / "job.sh").read_text()
    assert "--clusters" not in (mine / "job.sh").read_text()
    assert "clusters" not in json.loads((mine / "submission.json").read_text())
    assert jobs_of(here) == jobs_of(there) == [job_of(mine)]
    until(lambda: [one["state"] for one in states(hpcinit, here, mine, other)] == ["RUNNING", "RUNNING"])
    assert [one["clusters"] for one in states(hpcinit, here, mine, other)] == ["", there.name]
    line = hpcinit("status", other.name, env=here.env).stdout
    assert f"on {there.name}" in line
    ambiguous = hpcinit("cancel", job_of(mine), env=here.env)
    assert ambiguous.returncode == 2 and "two runs on different clusters or engines have the job id" in ambiguous.stderr
    # A variable in the job would make its srun and squeue ask slurmdbd, which a compute node may not reach.
    done = hpcinit("exec", other.name, "--", "env", env=here.env)
    assert f"SLURM_CLUSTER_NAME={there.name}\n" in done.stdout and "SLURM_CLUSTERS=" not in done.stdout, done.stderr

    cancelled = hpcinit("cancel", other.name, env=here.env)
    assert cancelled.returncode == 0, cancelled.stderr
    until(lambda: not jobs_of(there))
    assert jobs_of(here) == [job_of(mine)]
    assert [one["state"] for one in states(hpcinit, here, mine, other)] == ["RUNNING", "CANCELLED"]


def test_a_run_ends_and_the_next_waits_for_it(hpcinit: Run, clusters: tuple[MiniSlurm, MiniSlurm]) -> None:
    """The program runs on the other cluster, without SLURM_CLUSTERS. A job waits only for jobs on the same cluster."""
    here, there = clusters
    there_too = f"cluster.clusters={there.name}"
    first = submit(hpcinit, here, there_too, "wait=true", "--", "sh", "-c", "env; scontrol ping")
    log = (first / "logs/rank-0.log").read_text()
    assert f"SLURM_CLUSTER_NAME={there.name}" in log and "SLURM_CLUSTERS=" not in log
    assert " is UP" in log
    assert [one["state"] for one in states(hpcinit, here, first)] == ["COMPLETED"]
    running = submit(hpcinit, here, there_too, "name=running", *SLEEP)
    words = ("submit", "cluster=mini", "gpus_per_node=0", "cpus_per_rank=1", f"dependency=afterany:{running.name}")
    refused = hpcinit(*words, "--", "true", env=here.env)
    assert refused.returncode == 2 and "a job can wait only for jobs of the same cluster" in refused.stderr
    waiting = submit(hpcinit, here, there_too, f"dependency=afterany:{running.name}", "--", "true")
    assert [one["reason"] for one in states(hpcinit, here, waiting)] == ["Dependency"]
    again = hpcinit(*words[:-1], there_too, "name=running", *SLEEP, env=here.env)
    assert again.returncode == 2 and f"already queued as job {job_of(running)}" in again.stderr


def test_a_sweep_and_a_chain(hpcinit: Run, clusters: tuple[MiniSlurm, MiniSlurm]) -> None:
    """The jobs of a sweep and of a chain are on the other cluster; status, logs and cancel find each of them."""
    here, there = clusters
    there_too = f"cluster.clusters={there.name}"
    sweep = submit(
        hpcinit, here, there_too, "-m", "seed=1,2", "wait=true", "--", "sh", "-c", "echo task $SLURM_ARRAY_TASK_ID"
    )
    assert [(one["task"], one["state"], one["clusters"]) for one in states(hpcinit, here, sweep)] == [
        (number, "COMPLETED", there.name) for number in (0, 1)
    ]
    assert "task 1\n" in hpcinit("logs", f"{sweep.name}/1", env=here.env).stdout
    chain = submit(hpcinit, here, there_too, "chain=2", *SLEEP)
    assert len(jobs_of(there)) == 2 and not jobs_of(here)
    until(lambda: [one["state"] for one in states(hpcinit, here, chain)] == ["RUNNING"])
    assert hpcinit("cancel", chain.name, env=here.env).returncode == 0
    until(lambda: not jobs_of(there))
    assert [one["state"] for one in states(hpcinit, here, chain)] == ["CANCELLED"]


def test_a_failure(hpcinit: Run, clusters: tuple[MiniSlurm, MiniSlurm]) -> None:
    """A job on the other cluster requeues itself there. stacks and why report on it, before and after its end."""
    here, there = clusters
    Path("train.py").write_text(FAILING)
    restart = ("restart.max_restarts=1", "restart.on=[failure]")
    run = submit(hpcinit, here, f"cluster.clusters={there.name}", *restart, "--", "train.py")
    # It waits before its first attempt too, then without a number of restarts.
    until(lambda: [(one["state"], one["restart"]) for one in states(hpcinit, here, run)] == [("PENDING", 0)], 60)
    why = hpcinit("why", run.name, env=here.env)
    assert "ValueError: bad sample 17" in why.stdout, why
    begin_now(there, job_of(run))
    until((run / "waits").exists, 60)
    [now] = states(hpcinit, here, run)
    assert (now["state"], now["restart"], now["clusters"]) == ("RUNNING", 1, there.name)
    stacks = hpcinit("stacks", run.name, env=here.env)
    assert "in wait_for_the_end" in stacks.stdout, stacks.stdout + stacks.stderr
    (run / "end").touch()
    until(lambda: [one["state"] for one in states(hpcinit, here, run)] == ["FAILED"], 60)
    why = hpcinit("why", run.name, "--json", env=here.env).stdout
    assert json.loads(why)["rank"] == 0 and "SystemExit: 7" in json.loads(why)["verdict"], why
    again = hpcinit("resubmit", run.name, env=here.env)
    assert again.returncode == 0 and len(jobs_of(there)) == 1 and not jobs_of(here), again.stderr


def test_a_lost_reply(hpcinit: Run, clusters: tuple[MiniSlurm, MiniSlurm], tmp_path: Path) -> None:
    """sbatch makes the job on the other cluster and its reply is lost: the job is found there by its token."""
    here, there = clusters
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "sbatch").write_text(LOST.format(sbatch=shutil.which("sbatch"), folder=tmp_path))
    (bin_ / "sbatch").chmod(0o755)
    where = f"cluster.clusters={there.name}"
    folder = submit(hpcinit, here, where, *SLEEP, path=f"{bin_}:{os.environ['PATH']}")
    assert (tmp_path / "printed").read_text().strip() == f"{job_of(folder)};{there.name}"
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    assert jobs_of(there) == [job_of(folder)] and not jobs_of(here)
    assert json.loads((folder / "submission.json").read_text())["clusters"] == there.name


def test_the_other_controller_is_down(hpcinit: Run, clusters: tuple[MiniSlurm, MiniSlurm]) -> None:
    """Only the runs of the cluster without a controller lack its reply. A submission to it waits, then makes no job."""
    here, there = clusters
    mine, other = with_equal_ids(hpcinit, clusters)
    until(lambda: [one["state"] for one in states(hpcinit, here, mine, other)] == ["RUNNING", "RUNNING"])
    there.kill_controller()
    known, away = states(hpcinit, here, mine, other)
    assert (known["state"], known["away"], known["source"]) == ("RUNNING", False, "squeue")
    assert away["away"] and away["source"] != "squeue"
    expected = ("can't be reached now", "Could not get cluster information")  # Slurm 26.05 prints the second one
    assert any(text in str(away["reason"]) for text in expected), away["reason"]
    failed = hpcinit("cancel", other.name, env=here.env)
    assert failed.returncode == 1 and f"or type: scancel --clusters={there.name} {job_of(other)}\n" in failed.stderr
    assert jobs_of(here) == [job_of(mine)]
    words = (
        "submit",
        "cluster=mini",
        "gpus_per_node=0",
        f"cluster.clusters={there.name}",
        "cluster.submit_patience_s=3",
    )
    refused = hpcinit(*words, "name=late", *SLEEP, env=here.env)
    assert refused.returncode == 1 and "did not accept the job within 3 s" in refused.stderr, refused.stderr
    assert not list(Path("runs").glob("late*"))


def test_an_unknown_cluster(hpcinit: Run, clusters: tuple[MiniSlurm, MiniSlurm]) -> None:
    """A wrong name is refused at once, and so is a list of names."""
    here, _ = clusters
    words = ("submit", "cluster=mini", "gpus_per_node=0")
    done = hpcinit(*words, "cluster.clusters=nowhere", "--", "true", env=here.env)
    assert done.returncode == 1 and "No cluster 'nowhere' known by database" in done.stderr
    done = hpcinit(*words, "cluster.clusters='a,b'", "--", "true", env=here.env)
    assert done.returncode == 2 and "cluster.clusters is 'a,b', expected the name of one cluster" in done.stderr


def test_only_commands_inside_the_block_name_the_cluster() -> None:
    """sbatch reads the name from its script, and sacctmgr serves all clusters."""
    with slurm_client.on_cluster("b"):
        assert slurm_client.addressed(["squeue", "--me"]) == ("squeue", "--clusters=b", "--me")
        assert slurm_client.addressed(["sbatch", "job.sh"]) == ("sbatch", "job.sh")
        assert slurm_client.addressed(["sacctmgr", "show"]) == ("sacctmgr", "show")
        with slurm_client.on_cluster(None):
            assert slurm_client.addressed(["squeue"]) == ("squeue",)
    assert slurm_client.addressed(["squeue"]) == ("squeue",)
