"""Slurm gives job ids a second time, after slurmctld lost its state. A run is never mistaken for the new job with its old id.

A real controller with slurmdbd, whose state is removed while runs are in its queue.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.submitting import folder_of, job_of
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
SLEEP = ("--", "sleep", "600")
SMALL = ("cluster=mini", "gpus_per_node=0", "cpus_per_rank=1", "validate=false")  # --test-only takes a job id


class Reset(NamedTuple):
    """old, chain, sweep: runs of the lost state. new: a run that has the id of the chain's first job.

    foreign: jobs without hpcinit, with the ids of `old` and of the sweep.
    """

    cluster: MiniSlurm
    runs_dir: Path
    old: Path
    chain: Path
    sweep: Path
    new: Path
    foreign: list[str]


def lose_state(cluster: MiniSlurm) -> None:
    """Remove what slurmctld saved, as an administrator does who sets up a controller again."""
    cluster.stop_controller()
    shutil.rmtree(cluster.directory / "state")
    (cluster.directory / "state").mkdir()
    cluster.start_controller()
    cluster.wait_idle()


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniSlurm]:
    require_slurm(accounting=True)
    with MiniSlurm(nodes=1, gpus=0, cpus=8, accounting=True, name=f"ids-{os.getpid()}") as cluster:
        yield cluster


@pytest.fixture
def reset(cluster: MiniSlurm, hpcinit: Run, tmp_path: Path) -> Iterator[Reset]:
    def submit(*words: str) -> Path:
        done = hpcinit("submit", *SMALL, f"runs_dir={tmp_path}/runs", *words, env=cluster.env)
        assert done.returncode == 0, done.stderr
        return folder_of(done)

    def plain() -> str:
        return cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").strip()

    lose_state(cluster)
    later = "+cluster.sbatch.begin=now+1hour"
    old, chain = submit("name=old", later, *SLEEP), submit("name=chain", "chain=2", later, *SLEEP)
    done = hpcinit(
        "submit",
        "-m",
        *SMALL,
        f"runs_dir={tmp_path}/runs",
        "name=sweep",
        later,
        "+x=1,2",
        "--",
        "sleep",
        "60${x}",
        env=cluster.env,
    )
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "runs/sweep-0001"
    lose_state(cluster)
    foreign = [plain()]
    new = submit("name=new", *SLEEP)
    foreign += [plain(), plain()]
    assert [job_of(old), *json.loads((chain / "submission.json").read_text())["jobs"]] == [
        foreign[0],
        job_of(new),
        foreign[1],
    ]
    assert job_of(sweep) == foreign[2]  # the same array
    yield Reset(cluster, tmp_path / "runs", old, chain, sweep, new, foreign)
    cluster.cancel_all()


def states(hpcinit: Run, reset: Reset, *runs: Path) -> list[str]:
    done = hpcinit("status", "--json", *map(str, runs), env=reset.cluster.env)
    return [json.loads(line)["state"] for line in done.stdout.splitlines()]


def queued(reset: Reset) -> list[str]:
    return sorted(reset.cluster.run("squeue", "--noheader", "--format=%A", "--states=PENDING,RUNNING").split())


def test_a_new_job_with_an_old_id_is_not_the_run(hpcinit: Run, reset: Reset) -> None:
    """No command takes another job for the run: cancel ends none, and status, why, exec and a dependency use none."""
    env = reset.cluster.env
    everything = sorted([*reset.foreign, job_of(reset.new)])
    until(lambda: states(hpcinit, reset, reset.new) == ["RUNNING"])
    runs_dir = ("--runs-dir", str(reset.runs_dir))
    assert states(hpcinit, reset, reset.old, reset.chain, reset.new) == ["UNKNOWN", "UNKNOWN", "RUNNING"]
    assert states(hpcinit, reset, reset.old) == ["UNKNOWN"]  # a query for one job
    for run in (reset.old, reset.chain, reset.sweep, reset.sweep / "1"):
        done = hpcinit("cancel", str(run), env=env)
        assert queued(reset) == everything, done.stdout
        assert done.returncode == 0, done.stderr
    done = hpcinit("exec", str(reset.old), "--", "true", env=env)
    assert done.returncode == 2 and "job 1 is UNKNOWN" in done.stderr, done.stderr
    done = hpcinit(
        "submit", *SMALL, f"runs_dir={reset.runs_dir}", "dependency=afterany:old-0001", "--", "true", env=env
    )
    assert done.returncode == 2 and "Slurm has no record of job 1" in done.stderr, done.stderr + done.stdout
    # The id means the latest run that has it.
    done = hpcinit("status", "--json", job_of(reset.new), *runs_dir, env=env)
    assert json.loads(done.stdout)["run"] == str(reset.new)
    done = hpcinit("cancel", job_of(reset.new), *runs_dir, env=env)
    assert done.returncode == 0 and "new-0001: job 2 is being canceled" in done.stdout, done.stdout + done.stderr
    until(lambda: queued(reset) == sorted(reset.foreign))


def test_the_end_of_a_new_job_is_not_the_end_of_the_run(hpcinit: Run, reset: Reset) -> None:
    """The state and exit status of the other job, in the queue or only in accounting, are not those of the run."""
    ids = ",".join([*reset.foreign, job_of(reset.new)])
    known = ("sacct", "-X", "--noheader", "--parsable2", "--format=SubmitLine", f"--jobs={ids}")

    def is_recorded() -> bool:
        lines = reset.cluster.run(*known)
        return lines.count("--wrap") == 3 and str(reset.new) in lines

    # slurmdbd has the old job of each id until it records the new one. The lines of the foreign jobs have --wrap.
    until(is_recorded)
    reset.cluster.run("scancel", *reset.foreign, job_of(reset.new))
    reset.cluster.wait_idle()
    assert states(hpcinit, reset, reset.old, reset.chain, reset.new) == ["UNKNOWN", "UNKNOWN", "CANCELLED"]
    verdict = hpcinit("why", str(reset.old), env=reset.cluster.env)
    assert verdict.stdout.startswith("the cause is unknown: Slurm's state is UNKNOWN (Slurm no longer knows the job"), (
        verdict.stdout
    )
    # The controller forgets the jobs again; slurmdbd has the latest job of each id.
    lose_state(reset.cluster)
    assert states(hpcinit, reset, reset.old, reset.chain, reset.new) == ["UNKNOWN", "UNKNOWN", "CANCELLED"]
    reset.cluster.stop_controller()
    assert states(hpcinit, reset, reset.old) == ["UNKNOWN"]
    reset.cluster.start_controller()
