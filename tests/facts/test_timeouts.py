"""What is left of the job bounds its start-up."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from hpcinit.facts.errors import RequestError
from hpcinit.facts.timeouts import TimeoutLaw, left_of_job

RECORDED = Path(__file__).parents[1] / "data/slurm/24.11.5/gpus_per_task.json"


def test_the_job_bounds_its_start_up() -> None:
    """With less left of the job than the law gives, what is left less 30 s is the timeout; with more, nothing changes."""
    law = TimeoutLaw()
    assert law.start_up(8, timedelta(seconds=200.7)) == timedelta(seconds=170)
    assert (
        law.formula(8, timedelta(seconds=200.7)) == "min(3600, 300 + 3.5 x 8 nodes, 200 left of the job - 30) = 170 s"
    )
    assert law.start_up(8, timedelta(hours=1)) == law.start_up(8) == timedelta(seconds=328)


@pytest.mark.parametrize("left", [30, 0, -100])
def test_nothing_is_left(left: int) -> None:
    """A job whose end leaves no time for a start-up and its errors is told so, with the way out."""
    with pytest.raises(RequestError, match=rf"the job ends in {left} s .* ask for more \(time_min\)"):
        TimeoutLaw().start_up(1, timedelta(seconds=left))


def test_the_end_of_a_recorded_job() -> None:
    """Slurm 24.11 tells a task its job's end; ours is read where Slurm's is missing, and neither is no error."""
    env = json.loads(RECORDED.read_text())["tasks"][0]["env"]
    end, start = int(env["SLURM_JOB_END_TIME"]), int(env["SLURM_JOB_START_TIME"])
    assert left_of_job(env, start) == timedelta(seconds=end - start)
    assert left_of_job({"HPCINIT_JOB_END_TIME": "1000"}, 900.5) == timedelta(seconds=99.5)
    assert left_of_job({}, 0) is left_of_job({"SLURM_JOB_END_TIME": "0"}, 0) is None
