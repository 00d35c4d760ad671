"""One request is one job for users who are not root, in partitions that are visible, hidden or for a group only."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import other_user
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.other_user import User

pytestmark = pytest.mark.slurm
SCRIPT = "#!/bin/bash\n#SBATCH --begin=now+1hour --partition={partition}\nsleep 60\n"
HAND_OVER = """
import os, sys
from pathlib import Path
from hpcinit.slurm import exactly_once
script, token, confirm = sys.argv[1:]
print(exactly_once.submit(Path(script), os.environ, token, patience_s=40, confirm=bool(confirm))[0])
"""


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    require_slurm()
    with other_user.made(f"hpcinit-u{os.getpid()}", f"hpcinit-g{os.getpid()}") as user:
        yield user


@pytest.fixture(scope="module")
def cluster(user: User) -> Iterator[MiniSlurm]:
    """secret: Slurm's clients do not show its jobs, not even to their owner. team: for one group only."""
    partitions = {"secret": "Hidden=YES", "team": f"AllowGroups=hpcinit-g{os.getpid()}"}
    options = {"MessageTimeout": "3"}
    with MiniSlurm(nodes=2, name=f"user-{os.getpid()}", options=options, partitions=partitions) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_jobs_left(cluster: MiniSlurm) -> Iterator[None]:
    yield
    cluster.cancel_all()


@pytest.fixture(params=["main", "secret", "team"])
def partition(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def hand_over(cluster: MiniSlurm, user: User, partition: str, token: str, confirm: str = "") -> str:
    """Return the job's id, as exactly_once.submit() returns it to this user."""
    script = user.home / f"{token}.sh"
    script.write_text(SCRIPT.format(partition=partition))
    done = user.run(sys.executable, "-c", HAND_OVER, str(script), token, confirm, env=cluster.env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def jobs_with(cluster: MiniSlurm, token: str) -> list[str]:
    """Return every job with the token, including canceled ones. Only root sees all of them."""
    lines = cluster.run("squeue", "--all", "--noheader", "--states=all", "--format=%i|%k").splitlines()
    return [line.split("|")[0] for line in lines if token in line]


def test_a_job_that_is_confirmed(cluster: MiniSlurm, user: User, partition: str) -> None:
    """With cluster.submit_confirm=true and without faults, there is one job."""
    token = f"confirmed-in-{partition}"
    job_id = hand_over(cluster, user, partition, token, confirm="yes")
    assert jobs_with(cluster, token) == [job_id]


def test_a_controller_that_accepts_late(cluster: MiniSlurm, user: User, partition: str) -> None:
    """If sbatch times out and the controller accepts the job later, there is one job, and its id is returned."""
    token = f"late-in-{partition}"
    cluster.pause_controller()
    threading.Timer(6, cluster.resume_controller).start()
    job_id = hand_over(cluster, user, partition, token)
    assert jobs_with(cluster, token) == [job_id]


def test_the_same_request_is_refused(cluster: MiniSlurm, user: User, partition: str) -> None:
    """A queued request is not submitted again, whether Slurm's clients show the partition or not."""
    words = ["cluster=mini", f"partition={partition}", "nodes=2", "+cluster.sbatch.begin=now+1hour"]
    cluster_file(user, partition)
    first = submit(cluster, user, *words)
    assert first.returncode == 0, first.stderr
    second = submit(cluster, user, *words)
    assert second.returncode == 2 and "already queued as " in second.stderr, second.stderr
    assert len(cluster.run("squeue", "--all", "--noheader", "--format=%i").split()) == 1


def test_a_node_of_hidden_partitions_only(cluster: MiniSlurm, user: User) -> None:
    """A node in hidden partitions only is accepted, and hpcinit.after finds it when it fails."""
    others = ("main", "high", "team")
    for name in others:
        cluster.run("scontrol", "update", f"PartitionName={name}", "Nodes=n1")
    try:
        code = "from hpcinit.submit import excluded_nodes; print(excluded_nodes._unknown_nodes(['n2', 'n7'], None))"
        assert user.run(sys.executable, "-c", code, env=cluster.env).stdout == "{'n7'}\n"
        # A node that is down returns when its slurmd reports; one in this state stays.
        cluster.run("scontrol", "update", "NodeName=n2", "State=FAIL", "Reason=test")
        code = "from hpcinit.after import facts; print(*facts.lost_nodes('n[1-2]', ['n1']))"
        done = user.run(sys.executable, "-c", code, env=cluster.env)
        assert done.stdout == "n2\n", done.stderr
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
        for name in others:
            cluster.run("scontrol", "update", f"PartitionName={name}", "Nodes=ALL")


def submit(cluster: MiniSlurm, user: User, *words: str) -> subprocess.CompletedProcess[str]:
    return user.run(sys.executable, "-m", "hpcinit", "submit", *words, "--", "true", env=cluster.env)


def cluster_file(user: User, partition: str) -> Path:
    """Write a description of the test cluster with this partition."""
    folder = user.home / "conf/cluster"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mini.yaml"
    path.write_text(f"name: mini\npartition: {partition}\npartitions:\n  {partition}: {{nodes: 2, time_min: 60}}\n")
    return path
