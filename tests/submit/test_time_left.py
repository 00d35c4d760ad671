"""A training run knows how much of its job's time is seconds_left, even if the limit was changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import state
from tests.submitting import folder_of, job_id_of, printed, submit
from tests.waiting import until

TRAIN = """
import os, time
import hpcinit
from hpcinit.runtime.lifecycle import stopping
stopping.ASK_EVERY_S = 2
with hpcinit.session() as run:
    for step in range(10000):
        time.sleep(0.1)
        if step % 10 == 9: print("seconds_left", round(run.time_left().total_seconds()), flush=True)
        if stop := run.should_stop():
            print("stopped:", stop, flush=True)
            break
"""


def seconds_left(folder: Path, rank: int) -> int:
    """Return the seconds that the rank printed last."""
    log = folder / f"logs/rank-{rank}.log"
    found = re.findall(r"^seconds_left (\d+)$", log.read_text() if log.exists() else "", re.MULTILINE)
    return int(found[-1]) if found else 0


@pytest.mark.slurm
@pytest.mark.timeout(400)
def test_a_changed_limit_is_noticed(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """scontrol shortens the limit of a running job, and all ranks notice it within seconds and stop in time.

    The job's environment does not contain the new limit.
    """
    slurm = idle_slurm
    (tmp_path / "train.py").write_text(TRAIN)
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=1", "time_min=30", "--", "train.py")
    folder, job = folder_of(done), job_id_of(done)
    until(lambda: min(seconds_left(folder, 0), seconds_left(folder, 1)) > 1000)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    until(lambda: 0 < max(seconds_left(folder, 0), seconds_left(folder, 1)) <= 120, 30)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    until(lambda: state(slurm, job) not in ("RUNNING", "COMPLETING"), 120)
    assert state(slurm, job) == "COMPLETED"
    assert [printed(folder, rank).splitlines()[-1] for rank in (0, 1)] == ["stopped: time limit (rank 0)"] * 2


@pytest.mark.slurm
def test_the_time_that_slurm_gave_counts(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """--time-min lets Slurm start a job with a shorter limit than time_min, for example before a reservation."""
    slurm = idle_slurm
    (tmp_path / "train.py").write_text(TRAIN)
    slurm.run(
        "scontrol", "create", "reservation", "ReservationName=soon", "StartTime=now+12minutes", "Duration=60",
        "Nodes=ALL", "Users=root",
    )  # fmt: skip
    try:
        asked = ["nodes=1", "ranks_per_node=1", "time_min=30", "+cluster.sbatch.time-min=5"]
        done = submit(hpcinit, slurm, *asked, "--", "train.py")
        folder = folder_of(done)
        until(lambda: 0 < seconds_left(folder, 0) <= 12 * 60, 60)
    finally:
        slurm.run("scancel", "--user=root")
        slurm.run("scontrol", "delete", "ReservationName=soon")
