"""What `status` and `watch` show about a run, in addition to Slurm's state."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from hpcinit.engine import SLURM
from hpcinit.observe import find_runs, overview, progress, run_details, status_table
from hpcinit.observe.state import State
from hpcinit.records import hang_report, world_size
from hpcinit.records.hang_report import HangReport
from hpcinit.records.heartbeats import NodeHeartbeats, RankHeartbeat
from hpcinit.records.world_size import WrongWorldSize

RUNNING = State("RUNNING", "77", SLURM, start="2026-11-21T14:00:00", elapsed_s=3723, left_s=60)


def training(path: Path, ago_s: float) -> Path:
    document = {"step": 20, "total": 60, "values": {"loss": 2.3123456, "lr": 3e-4}, "time": time.time() - ago_s}
    (path / "progress.json").write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("start", "shown"),
    [
        ("2026-11-21T14:02:00", "14:02 (in 12:00)"),
        ("2026-11-23T01:00:00", "2026-11-23 01:00 (in 1-11:10:00)"),
        ("2026-11-21T13:49:00", "13:49"),
        ("soon", "soon"),
    ],
)
def test_when(start: str, shown: str) -> None:
    """An estimated start is shown as a time and as a duration from now."""
    assert run_details.when(start, datetime(2026, 11, 21, 13, 50)) == shown


def test_details_of_a_training_run(tmp_path: Path) -> None:
    """Details contain elapsed and remaining time, step and values, and the age of the last step if it is long."""
    assert (
        run_details.details(training(tmp_path, 5), RUNNING)
        == "for 1:02:03, 1:00 left  step 20/60  loss 2.312  lr 0.0003"
    )
    assert run_details.details(training(tmp_path, 312), RUNNING).endswith("lr 0.0003  last step 5:12 ago")
    waiting = State("PENDING", "77", SLURM, "Priority", start="2026-11-21T14:00:00")
    assert "step" not in run_details.details(tmp_path, waiting) and "starts about" in run_details.details(
        tmp_path, waiting
    )


def test_the_age_of_a_step_from_heartbeats(tmp_path: Path) -> None:
    """The age is that of the latest step of any rank of the last attempt."""
    for attempt, silent_s in (("77.0.0", 5.0), ("77.0.1", 200.0)):
        (tmp_path / "heartbeats" / attempt).mkdir(parents=True)
        heartbeats = (
            RankHeartbeat(0, 1, 3, silent_s + 50),
            RankHeartbeat(1, 2, 3, silent_s),
            RankHeartbeat(2, 3, -1, None),
        )
        (tmp_path / "heartbeats" / attempt / "n1.json").write_text(NodeHeartbeats("n1", 1000.0, heartbeats).to_json())
        os.utime(tmp_path / "heartbeats" / attempt, (silent_s, silent_s))
    assert progress.age_s(tmp_path, 1010.0) == 210.0
    assert progress.age_s(tmp_path / "none", 1010.0) is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"step": 1}'])
def test_an_invalid_progress_file_is_ignored(tmp_path: Path, text: str) -> None:
    """An invalid progress.json is not shown and causes no error."""
    (tmp_path / "progress.json").write_text(text)
    assert (progress.read(tmp_path), progress.line(tmp_path)) == ({}, "")


REPORT = HangReport(
    rank=1,
    host="n2",
    state=hang_report.ELSEWHERE,
    silent_s=9.0,
    last_steps=((3, (0, 1)),),
    waiting=(hang_report.Waiting((0,), "all_reduce", "train.py:12 in <module>"),),
    stuck=(hang_report.StuckRank(1, "n2", 7, hang_report.ELSEWHERE, "train.py:11 in <module>"),),
)


def shown_everywhere(path: Path, now: State) -> tuple[list[str], str, str]:
    """Return `hang` and `stopped` of the JSON, and the note of the line, which must be in the table too."""
    run = overview.Run(path, now)
    [document] = run_details.documents(run)
    console = Console(width=400, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(status_table.status_table([run], each_task=True))
    notes = [one for one in run_details.details(path, now).split("  ") if one.startswith(("the training", "stopped"))]
    line = "".join(notes)
    assert line in capture.get() and bool(line) == bool(re.search("training hangs|stopped before", capture.get()))
    return document["hang"], document["stopped"], line


def test_a_hang(tmp_path: Path) -> None:
    """A running job shows the hang report of its current attempt; a job that is over shows none."""
    training(tmp_path, 5)
    running = RUNNING._replace(restart=1)
    (tmp_path / "hang/77.0.0").mkdir(parents=True)
    (tmp_path / "hang/77.0.0" / hang_report.RECORD).write_text(HangReport(text=("of an attempt before",)).to_json())
    assert shown_everywhere(tmp_path, running) == ([], "", "")
    (tmp_path / "hang/77.0.1").mkdir()
    (tmp_path / "hang/77.0.1" / hang_report.RECORD).write_text(REPORT.to_json())
    who = "the training hangs: rank 1 on n2 is not in a collective: it is at train.py:11 in <module>"
    assert shown_everywhere(tmp_path, running) == (list(REPORT.lines()), "", who)
    assert shown_everywhere(tmp_path, running._replace(name="CANCELLED")) == ([], "", "")


@pytest.mark.parametrize(
    ("record", "job_id", "step", "why"),
    [
        ({"job": "77", "reason": "time_limit"}, "77", 20, "time limit"),
        ({"job": "77", "reason": "not_recorded"}, "77", 20, "the reason was not recorded"),
        ({"job": "", "reason": "preempted"}, "4711", 20, "preempted"),  # without Slurm
        ({"job": "80", "reason": "time_limit"}, "77_3", 20, "time limit"),
        ({"job": "76", "reason": "time_limit"}, "77", 20, ""),  # the record of an earlier job
        ({"job": "77", "reason": "time_limit"}, "77", 60, ""),  # it reached its last step
        ({"job": "77"}, "77", 20, ""),
    ],
)
def test_a_run_that_stopped_early(tmp_path: Path, record: dict[str, str], job_id: str, step: int, why: str) -> None:
    """A successful run that stopped before its last step shows why; the record of an earlier job does not count."""
    (tmp_path / "progress.json").write_text(json.dumps({"step": step, "total": 60, "values": {}}))
    (tmp_path / "stopped.json").write_text(json.dumps(record))
    now = State("COMPLETED", job_id, SLURM, exit_status=0)
    assert shown_everywhere(tmp_path, now) == ([], why, f"stopped before its end: {why}" if why else "")
    assert shown_everywhere(tmp_path, now._replace(name="FAILED", exit_status=1)) == ([], "", "")


def test_the_table(tmp_path: Path) -> None:
    """The table has bars and a row per task, failures before waiting tasks, and counts the rows that do not fit."""
    training(tmp_path, 0)
    states = [("PENDING", None), ("FAILED", 3), ("COMPLETED", 0), ("RUNNING", None)]
    tasks = [
        find_runs.Task(
            number,
            tmp_path,
            (f"seed={number}",),
            tmp_path / str(number),
            State(name, f"9_{number}", SLURM, exit_status=status),
        )
        for number, (name, status) in enumerate(states)
    ]
    runs = [overview.Run(Path("train-0001"), RUNNING), overview.Run(Path("sweep-0001"), tasks=tasks)]
    console = Console(width=160, color_system=None, force_terminal=False)

    def shown(most: int | None) -> list[str]:
        with console.capture() as capture:
            console.print(status_table.status_table(runs, each_task=True, most=most))
        return [line.split()[0] for line in capture.get().splitlines()[1:]]

    assert shown(None) == ["train-0001", "sweep-0001", "0", "1", "2", "3"]
    assert shown(50) == ["train-0001", "sweep-0001", "3", "1", "0", "2"]
    assert shown(4) == ["train-0001", "sweep-0001", "3", "and"]
    world_size.record(tmp_path, WrongWorldSize("torchrun", 2, "n1", 7, 4, "1 node x 4 ranks"))
    with console.capture() as capture:
        console.print(status_table.status_table([overview.Run(tmp_path, RUNNING)], each_task=True))
    row = " ".join(capture.get().split())
    assert "warning: a process group of 2 ranks in a job of 4 ranks" in row and "step" not in row
    assert "RUNNING" in row and "20/60" in row and "1:02:03, 1:00 left" in row and "loss 2.312" in row and "━" in row


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_broken_on_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    """On a narrow terminal the parameters of a sweep stay columns, and no text of a row is broken inside a name or cut off."""
    words = [("lr=0.003", "model.width=2048"), ("lr=0.001", "model.width=512")]
    state = State("COMPLETED", "12345_1", SLURM, exit_status=0, reason="NonZeroExitCode of the prolog")
    runs = [
        overview.Run(
            Path("sweep-0001"),
            tasks=[find_runs.Task(at, tmp_path, one, tmp_path / str(at), state) for at, one in enumerate(words)],
        ),
        overview.Run(Path("train-0001"), state._replace(job_id="7")),
    ]
    typed = "cluster=mycluster nodes=8 parallel=fsdp -- train.py --data /scratch/a/very/long/path --lr 0.1"
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(status_table.status_table(runs, each_task=True, about=["", typed]))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines[0].split() == ["run", "job", "state", "lr", "model.width"], lines
    assert any(line.split()[:5] == ["0", "12345_1", "COMPLETED", "0.003", "2048"] for line in lines), lines
    assert max(map(len, lines)) <= width
    shown = " ".join(lines).split()
    assert set(typed.split()) <= set(shown) and {"NonZeroExitCode", "prolog"} <= set(shown), lines
