"""What proves that a job has ended, as an ordinary user on a real Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from hpcinit.slurm import queue, slurm_client
from tests import other_user
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.other_user import User
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    require_slurm()
    with other_user.made(f"hpcinit-c{os.getpid()}", f"hpcinit-d{os.getpid()}") as user:
        yield user


@pytest.fixture(scope="module")
def cluster(user: User) -> Iterator[MiniSlurm]:
    """secret: squeue does not show its jobs, not even to their owner."""
    with MiniSlurm(nodes=2, gpus=0, name=f"ended-{os.getpid()}", partitions={"secret": "Hidden=YES"}) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_jobs_left(cluster: MiniSlurm) -> Iterator[None]:
    yield
    cluster.cancel_all()


def sbatch(cluster: MiniSlurm, user: User, *words: str) -> str:
    """Submit as the user; return the job's id."""
    done = user.run("sbatch", "--parsable", "--output=job-%j.log", *words, env=cluster.env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sleepers(job: str) -> list[int]:
    """Return the processes of the job that are `sleep`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "comm").read_text() == "sleep\n" and f"SLURM_JOB_ID={job}\0" in (path / "environ").read_text():
                found.append(int(path.name))
    return found


def test_what_proves_the_end_of_a_job(cluster: MiniSlurm, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has ended in a final state only: not while it waits, runs or is requeued, and not if Slurm forgot it."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    limit = timedelta(seconds=30)
    job = sbatch(cluster, user, "--partition=secret", "-wn1", "--requeue", "--wrap=sleep 600")
    until(lambda: sleepers(job))
    assert queue.has_ended(job, limit) is False
    cluster.run("scontrol", "requeue", job)
    assert queue.has_ended(job, limit) is False
    cluster.run("scancel", job)
    until(lambda: queue.has_ended(job, limit))
    assert queue.has_ended("4000000", limit) is None


def queue_state(cluster: MiniSlurm, job: str) -> str:
    return re.findall(r"JobState=(\w+)", cluster.run("scontrol", "show", "job", job))[0]


def test_a_truncated_answer_proves_no_end(cluster: MiniSlurm, user: User, tmp_path: Path) -> None:
    """Whatever part of its answer scontrol prints, and if it fails after it, only the whole answer shows that jobs ended."""
    script = user.home / "het.sh"
    script.write_text("#!/bin/bash\n#SBATCH -wn2 -n1\n#SBATCH hetjob\n#SBATCH -wn1 -n1\ntrue\n")
    leader = sbatch(cluster, user, str(script))
    until(lambda: queue_state(cluster, leader) == "COMPLETED")
    whole = cluster.run("scontrol", "--all", "show", "job", leader)
    assert whole.count("JobState=COMPLETED") == 2
    stand_in(tmp_path, "scontrol", 'cat "$ANSWER"; exit "$STATUS"')
    stand_in(tmp_path, "sacct", "echo COMPLETED")

    def found(text: str, status: int = 0) -> bool | None:
        (tmp_path / "answer").write_text(text)
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ANSWER": f"{tmp_path}/answer", "STATUS": str(status)}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            with suppress(slurm_client.Unreachable):
                return queue.has_ended(leader, timedelta(seconds=30))
        return None

    assert found(whole) is True and found(whole, 1) is None
    cuts = [0, *(match.end() for match in re.finditer(r"\n", whole)), *range(3, len(whole), 61)]
    for cut in cuts:
        assert found(whole[:cut]) in (None, False) or cut == len(whole), whole[:cut]
    record = "JobId={} {}JobName=x\n   JobState=COMPLETED\n\n"
    assert found(record.format(leader, "")) is True
    assert found(record.format(int(leader) + 9, "")) is None, "an answer about another job"


def stand_in(folder: Path, name: str, shell: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{shell}\n")
    (folder / name).chmod(0o755)
