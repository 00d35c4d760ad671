"""The remaining time of the job limits its start-up."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.records.startup_timeout import StartupTimeout, check_clock, left_of_job
from hpcinit.slurm import queue

RECORDED = Path(__file__).parents[1] / "data/slurm/24.11.5/gpus_per_task.json"


def test_the_job_bounds_its_start_up() -> None:
    """If the remaining time is shorter than the formula, it minus 30 s is the timeout; otherwise the formula counts."""
    formula = StartupTimeout()
    assert formula.start_up(8, timedelta(seconds=200.7)) == timedelta(seconds=170)
    assert (
        formula.text(8, timedelta(seconds=200.7)) == "min(3600, 300 + 3.5 x 8 nodes, 200 left of the job - 30) = 170 s"
    )
    assert formula.start_up(8, timedelta(hours=1)) == formula.start_up(8) == timedelta(seconds=328)


@pytest.mark.parametrize("left", [30, 0, -100])
def test_no_time_is_left(left: int) -> None:
    """If no time is left for a start-up and its errors, the error shows what to request."""
    with pytest.raises(RequestError, match=rf"the job ends in {left} s .* Request more time with time_min"):
        StartupTimeout().start_up(1, timedelta(seconds=left))


def test_the_end_of_a_recorded_job() -> None:
    """The end of the job is read from Slurm 24.11's variable or else from hpcinit's; without both it is unknown."""
    env = json.loads(RECORDED.read_text())["tasks"][0]["env"]
    end, start = int(env["SLURM_JOB_END_TIME"]), int(env["SLURM_JOB_START_TIME"])
    assert left_of_job(env, start) == timedelta(seconds=end - start)
    assert left_of_job({"HPCINIT_JOB_END_TIME": "1000"}, 900.5) == timedelta(seconds=99.5)
    assert left_of_job({}, 0) is left_of_job({"SLURM_JOB_END_TIME": "0"}, 0) is None


@pytest.mark.parametrize(
    ("env", "left_s", "message"),
    [
        ({"HPCINIT_JOB_END_TIME": "13000", "HPCINIT_JOB_LIMIT_S": "3600"}, 3000, None),
        ({"HPCINIT_JOB_END_TIME": "13700", "HPCINIT_JOB_LIMIT_S": "3600"}, 3700, None),  # clocks differ by 100 s
        ({"HPCINIT_JOB_END_TIME": "2800", "HPCINIT_JOB_LIMIT_S": "3600"}, 3600, "is 7200 s ago by this node's clock"),
        (
            {"HPCINIT_JOB_END_TIME": "20000", "HPCINIT_JOB_LIMIT_S": "3600"},
            3600,
            "is 10000 s ahead by this node's clock",
        ),
        (
            {"SLURM_JOB_END_TIME": "5000", "SLURM_JOB_START_TIME": "4000"},
            1000,
            "the job's time limit is 1000 s: hpcinit assumes that the whole limit remains",
        ),
        ({"SLURM_JOB_END_TIME": "5000"}, None, "by this node's clock, so hpcinit ignores it. Is the"),
        ({}, None, None),
    ],
)
def test_a_clock_that_cannot_be_right(env: dict[str, str], left_s: int | None, message: str | None) -> None:
    """An end in the past, or later than the limit allows, is replaced by now plus the limit, with a warning."""
    warning = check_clock(env, 10000.0)
    assert (message in warning and warning.startswith("warning: ")) if message else warning == ""
    left = left_of_job(env, 10000.0)
    assert left == (None if left_s is None else timedelta(seconds=left_s))
    assert check_clock(env, 10000.0) == "", "the second call has nothing to correct"


@pytest.mark.parametrize(
    ("text", "found"),
    [("1-02:03:04", 93784), ("2:03:04", 7384), ("4:05", 245), ("0:00", 0), ("UNLIMITED", None), ("", None)],
)
def test_seconds_as_squeue_prints_them(text: str, found: int | None) -> None:
    """Recorded values of squeue's %L (Slurm 22.05) are parsed; a job without a limit has None."""
    assert queue.seconds(text) == found
