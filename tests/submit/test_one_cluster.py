"""Variables with which users change the output of Slurm's clients, or the cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcinit.checks import validate
from hpcinit.slurm.queue import QueueQuery
from hpcinit.submit import job_environment
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.slurm_lines import squeue_line
from tests.submitting import folder_of, job_id_of

# Variables that people put into a profile, and that change the output of Slurm's clients.
PREFERENCES = {
    "SQUEUE_FORMAT": "%P",
    "SQUEUE_PARTITION": "high",
    "SINFO_PARTITION": "none",
    "SCANCEL_INTERACTIVE": "1",
    "SCANCEL_PARTITION": "high",
    "SCONTROL_ONELINER": "1",
    "SLURM_TIME_FORMAT": "relative",
}


@pytest.mark.slurm
def test_with_preferences_and_the_clusters_own_name(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """Submission, status, discover, doctor and cancel work as without these variables."""
    env = {**idle_slurm.env, **PREFERENCES, "SLURM_CLUSTERS": idle_slurm.name}
    words = ("submit", "cluster=mini", "+cluster.sbatch.begin=now+1hour", "--", "true")
    done = hpcinit(*words, env=env)
    assert done.returncode == 0, done.stderr
    assert "SLURM_CLUSTERS" in done.stderr and "SQUEUE_FORMAT" not in done.stderr
    again = hpcinit(*words, env=env)
    assert again.returncode == 2 and f"already queued as job {job_id_of(done)}" in again.stderr
    shown = hpcinit("status", folder_of(done).name, env=env).stdout
    assert "PENDING" in shown and job_id_of(done) in shown
    plain = hpcinit("discover", "--print", env=idle_slurm.env).stdout
    assert hpcinit("discover", "--print", env=env).stdout == plain != ""
    checked = hpcinit("doctor", "cluster=mini", env=env)
    assert "partition main" in checked.stdout and "4 idle" in checked.stdout, checked.stdout
    cancelled = hpcinit("cancel", folder_of(done).name, env=env)
    assert cancelled.returncode == 0, cancelled.stderr
    assert not idle_slurm.run("squeue", "--noheader").strip()


@pytest.mark.slurm
def test_another_cluster(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """A job on another cluster is refused, because hpcinit could not find it again. No files remain."""
    env = {**idle_slurm.env, "SLURM_CLUSTERS": "elsewhere"}
    for words in ([], ["--multirun", "seed=1,2"]):
        done = hpcinit("submit", "cluster=mini", *words, "--", "true", env=env)
        assert done.returncode == 2, done.stderr
        assert f"SLURM_CLUSTERS is 'elsewhere', expected '{idle_slurm.name}' or unset" in done.stderr
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_a_heading_above_the_answer_of_sinfo(tmp_path: Path) -> None:
    """The line 'CLUSTER: name' is not a partition.

    A stand-in prints it, because sinfo prints it only with several clusters.
    """
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'CLUSTER: a'\necho '2 down* main*'\necho '2 idle main*'\n")
    (tmp_path / "sinfo").chmod(0o755)
    said = validate._missing_nodes("#SBATCH --nodes=4", {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert said == "2 of 4 nodes are down, drained or reserved"


def test_a_heading_above_the_answer_of_squeue(tmp_path: Path) -> None:
    """The line 'CLUSTER: name' is not a job.

    A stand-in prints it, because squeue prints it only with several clusters.
    """
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho 'CLUSTER: a'\necho '{squeue_line('7', 'RUNNING')}'\n")
    (tmp_path / "squeue").chmod(0o755)
    found = QueueQuery("--me", ended=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}).jobs()
    assert [(job.job_id, job.state) for job in found] == [("7", "RUNNING")]


def test_preferences_do_not_reach_the_job() -> None:
    """Output formats for squeue and sinfo are dropped without a note, because the batch script calls both."""
    kept, named = job_environment.clean_environment(
        {**PREFERENCES, "SLURM_CLUSTERS": "a", "SLURM_CONF": "/etc/x", "HOME": "/home/me"}
    )
    assert kept == {"SLURM_CONF": "/etc/x", "HOME": "/home/me"}
    assert named == ["SLURM_CLUSTERS", "SLURM_TIME_FORMAT"]
