"""Faults during submission, on the real Slurm: the number of jobs afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests import other_user
from tests.chaos import outcomes
from tests.chaos.conftest import ALL
from tests.chaos.outcomes import Outcome
from tests.minislurm import MiniSlurm
from tests.other_user import User

pytestmark = [pytest.mark.slurm, pytest.mark.chaos(short=True), pytest.mark.timeout(400)]
PARTITION = "secret"


@pytest.fixture
def user() -> Iterator[User]:
    with other_user.made(f"hpcinit-c{os.getpid()}", f"hpcinit-h{os.getpid()}") as user:
        yield user


@pytest.fixture
def hidden(user: User) -> Iterator[MiniSlurm]:
    """A cluster with a hidden partition, and its cluster file in the user's folder."""
    (user.home / "conf/cluster").mkdir(parents=True)
    described = f"name: mini\npartition: {PARTITION}\npartitions:\n  {PARTITION}: {{nodes: 1, time_min: 60}}\n"
    (user.home / "conf/cluster/mini.yaml").write_text(described)
    options, partitions = {"MessageTimeout": "3"}, {PARTITION: "Hidden=YES"}
    with MiniSlurm(1, name=f"hidden-{os.getpid()}", options=options, partitions=partitions) as cluster:
        yield cluster


def test_a_controller_that_accepts_late(user: User, hidden: MiniSlurm) -> None:
    """If sbatch times out before the controller accepts the job, in a hidden partition, there is exactly one job."""
    arguments = ["cluster=mini", "again=true", "validate=false", "+cluster.sbatch.begin=now+1hour", "--", "true"]
    env = {"PATH": os.environ["PATH"], "HOME": str(user.home), **hidden.env}
    hidden.pause_controller()
    since = time.monotonic()
    command = user.command(sys.executable, "-m", "hpcinit", "submit", *arguments)
    with subprocess.Popen(
        command, env=env, cwd=user.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline().strip()
        seconds = time.monotonic() - since
        hidden.resume_controller()
        out, err = process.communicate(timeout=120)
    jobs = hidden.run("squeue", "--all", "--noheader", "--states=all", "--format=%i").split()
    assert process.returncode == 0, err
    ends = f"submitted, {len(jobs)} job"
    if os.environ.get(ALL) == "1":
        fault = (
            "sbatch times out and the job is taken late, in a hidden partition (the line is that of `hpcinit submit`)"
        )
        outcomes.keep(Outcome(fault, "srun", first, seconds, None, ends))
    assert "Socket timed out" in first and ends == "submitted, 1 job" and f"job {jobs[0]} on mini" in out
