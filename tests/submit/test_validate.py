"""`sbatch --test-only` on a real cluster refuses impossible jobs and estimates when the others start."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest

from hpcinit.base.errors import SubmitError
from hpcinit.checks import validate
from hpcinit.config.compose import compose
from hpcinit.slurm.sbatch import sbatch
from hpcinit.submit import script
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_sbatch_errors import REFUSED
from tests.submitting import submit

TRUE = ["--", "true"]


def write(path: Path, *words: str) -> Path:
    config = compose(["cluster=mini", "cluster.partitions={}", "job=smoke", *words])
    (path / "job.sh").write_text(script.render(config, path, path))
    return path / "job.sh"


@pytest.mark.slurm
def test_the_start_is_estimated(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """A job starts at once on an idle cluster and after the running job on a full one. A switch disables the line."""
    done = submit(
        hpcinit, idle_slurm, "nodes=2", "+cluster.sbatch.nodelist='n[1-2]'", "+cluster.sbatch.hold=true", *TRUE
    )
    assert done.stdout.splitlines()[3:] == ["Slurm expects to start the job now on n[1-2]"], done.stderr
    idle_slurm.cancel_all()
    busy = ["sbatch", "--nodes=4", "--exclusive", "--time=20", "--output=/dev/null", "--wrap=sleep 600"]
    subprocess.run(busy, env={**os.environ, **idle_slurm.env}, check=True, capture_output=True)
    done = submit(hpcinit, idle_slurm, *TRUE)
    (line,) = done.stdout.splitlines()[3:]
    assert line.startswith("Slurm expects to start the job by ") and "(in 20 min) on n" in line
    assert line.endswith(validate.EARLIER), "the running job may end before its time limit"
    assert len(submit(hpcinit, idle_slurm, "validate=false", "again=true", *TRUE).stdout.splitlines()) == 3


@pytest.mark.slurm
def test_a_job_that_would_wait_forever_is_refused(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """More nodes than the cluster has, which sbatch itself accepts, are refused with the lines at fault.

    No folder remains.
    """
    words = ["cluster.partitions.main.nodes=null", "nodes=9"]
    done = submit(hpcinit, idle_slurm, *words, *TRUE)
    assert (done.returncode, done.stdout) == (1, "")
    assert "sbatch --test-only: Requested node configuration is not available" in done.stderr
    assert "#SBATCH --nodes=9  " in done.stderr and "set by nodes" in done.stderr
    assert done.stderr.endswith("to submit without this check: validate=false; nothing was submitted\n")
    assert list((tmp_path / "runs").iterdir()) == []
    if tuple(map(int, idle_slurm.version().split(".")[:2])) >= (24, 11):
        return  # its sbatch refuses the request itself
    taken = submit(hpcinit, idle_slurm, *words, "validate=false", "again=true", *TRUE)
    assert taken.returncode == 0 and idle_slurm.run("squeue", "--noheader", "--format=%r").strip() in {
        "PartitionNodeLimit",
        "PartitionConfig",
        "None",
    }
    assert "not" not in submit(hpcinit, idle_slurm, *words, "dry_run=true", *TRUE).stderr


@pytest.mark.slurm
def test_test_only_refuses_what_sbatch_refuses(slurm: MiniSlurm, tmp_path: Path) -> None:
    """Requests that sbatch refuses are refused by --test-only before, with an explanation."""
    env = {**os.environ, **slurm.env}
    for words, _, options in REFUSED:
        path = write(tmp_path, *words)
        with pytest.raises(SubmitError):
            sbatch(path, env)
        with pytest.raises(SubmitError, match="sbatch --test-only: ") as caught:
            validate.sbatch_test_only(path, env)
        said = str(caught.value)
        assert any(f"#SBATCH --{option}" in said for option in options), (words, said)


@pytest.mark.slurm
@pytest.mark.parametrize("state", ["drain", "down"])
def test_nodes_that_are_down_for_now(hpcinit: Run, idle_slurm: MiniSlurm, state: str) -> None:
    """A job that waits for drained or dead nodes is submitted with a warning, because sbatch accepts it."""
    if state == "down":  # a node that is only set down becomes idle when it reports next
        idle_slurm.kill_node("n4")
        end = time.monotonic() + 120
        while idle_slurm.node_states()["n4"] != "down*":
            assert time.monotonic() < end, idle_slurm.node_states()
            time.sleep(0.5)
    else:
        idle_slurm.run("scontrol", "update", "nodename=n4", f"state={state}", "reason=test")
    try:
        done = submit(hpcinit, idle_slurm, "nodes=4", *TRUE)
        assert done.returncode == 0, done.stderr
        assert "warning: Slurm cannot start the job now: Requested node configuration is not available" in done.stderr
        assert (
            "1 of 4 nodes of partition main are down, drained or reserved, so the job will wait in the queue"
            in done.stderr
        )
        assert submit(hpcinit, idle_slurm, "cluster.partitions.main.nodes=null", "nodes=5", *TRUE).returncode == 1
    finally:
        if state == "down":
            idle_slurm.start_node("n4")
        else:  # before canceling its jobs, which waits for idle nodes
            idle_slurm.run("scontrol", "update", "nodename=n4", "state=resume")


@pytest.mark.slurm
def test_a_controller_that_is_down(slurm: MiniSlurm, tmp_path: Path) -> None:
    """Without an answer nothing is printed. The sbatch call that follows handles the controller."""
    away = tmp_path / "slurm.conf"
    text = (Path(slurm.env["SLURM_CONF"])).read_text()
    away.write_text(
        text.replace("SlurmctldTimeout=", "MessageTimeout=2\nSlurmctldTimeout=").replace(
            "SlurmctldHost=", "SlurmctldPort=1\nSlurmctldHost="
        )
    )
    assert validate.sbatch_test_only(write(tmp_path), {**os.environ, "SLURM_CONF": str(away)}) == ""
    assert validate.sbatch_test_only(write(tmp_path), {"PATH": "/nowhere"}) == ""


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("allocation failure: Socket timed out on send/recv operation", 1),
        ("allocation failure: Unexpected missing socket error", 1),
        ("allocation failure: Unable to contact slurm controller (connect failure)", 1),
        ("allocation failure: Slurm temporarily unable to accept job, sleeping and retrying", 1),
        ("sbatch: error: Batch job submission failed: Resource temporarily unavailable", 1),
        ("sbatch: fatal: Could not establish a configuration source", 1),
        ("", 1),
        ("this site's sbatch is a script that knows no --test-only", 0),
        ("sbatch: Job 5 to start at Unknown using 4 processors on nodes n1 in partition main", 0),
    ],
)
def test_no_answer(tmp_path: Path, answer: str, status: int) -> None:
    """An error that is not an answer is not a refusal. A stand-in for sbatch fails on demand."""
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\necho "{answer}" >&2\nexit {status}\n')
    (tmp_path / "sbatch").chmod(0o755)
    assert validate.sbatch_test_only(write(tmp_path), {"PATH": f"{tmp_path}:{os.environ['PATH']}"}) == ""


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("2026-11-20T10:00:30", "Slurm expects to start the job now on n[1-2]"),
        ("2026-11-20T10:12:00", "Slurm expects to start the job by 10:12 (in 12 min) on n[1-2]"),
        ("2026-11-20T14:05:00", "Slurm expects to start the job by 14:05 (in 4 h) on n[1-2]"),
        ("2026-11-21T11:00:00", "Slurm expects to start the job by Sat 21 Nov 11:00 (in 25 h) on n[1-2]"),
        ("2026-11-25T10:00:00", "Slurm expects to start the job by Wed 25 Nov 10:00 (in 5 days) on n[1-2]"),
    ],
)
def test_the_sentence_for_a_start_time(start: str, said: str) -> None:
    """Slurm's start time is shown as a person would write it, with the time until then."""
    later = "" if said.startswith("Slurm expects to start the job now") else validate.EARLIER
    assert validate.start_expectation(start, "n[1-2]", datetime(2026, 11, 20, 10, 0, 0)) == said + later


def test_long_lists_of_nodes_are_not_shown() -> None:
    """A list of nodes that would fill the line is not shown."""
    assert (
        validate.start_expectation("2026-11-20T10:00:00", "n1," * 50, datetime(2026, 11, 20, 10))
        == "Slurm expects to start the job now"
    )
