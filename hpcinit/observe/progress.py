"""How far a training run is (progress.json, written by `run.progress()`), and notes on a stop or a hang."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcinit.observe.state import State
from hpcinit.records import heartbeats, plain_files, run_folder
from hpcinit.records.stop_reasons import sentence

if TYPE_CHECKING:
    from hpcinit.records.hang_report import HangReport


def read(path: Path) -> dict[str, Any]:
    """{step, total, values: {name: number}, time}, or {} before the first, and where it cannot be read."""
    try:
        with open(f"{path}/{run_folder.PROGRESS}", "rb", buffering=0) as file:  # noqa: PTH123 - many runs
            document = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    known = isinstance(document, dict) and {"step", "total", "values"} <= document.keys()
    return document if known else {}


def line(path: Path) -> str:
    """'step 20/60  loss 2.31', or ''."""
    return words(read(path))


def words(document: Mapping[str, Any]) -> str:
    """The same of what read() returns."""
    return "  ".join([f"step {document['step']}/{document['total']}", *values(document)]) if document else ""


def values(document: Mapping[str, Any]) -> list[str]:
    """['loss 2.31', 'lr 0.0003'] of what read() returns."""
    return [
        f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} {value}"
        for name, value in document.get("values", {}).items()
    ]


def age_s(path: Path, now_s: float) -> float | None:
    """Seconds since any rank told a step, by its last attempt's beats, or else since rank 0 told its progress."""
    attempts = [entry for entry in _entries(path / heartbeats.FOLDER) if entry.is_dir()]
    last = max(attempts, key=lambda entry: entry.stat().st_mtime, default=None)
    told = [
        max(0.0, now_s - node.time) + beat.silent_s
        for node in (heartbeats.read(Path(last.path)) if last else [])
        for beat in node.beats
        if beat.silent_s is not None
    ]
    time_s = read(path).get("time")
    if isinstance(time_s, int | float):
        told.append(max(0.0, now_s - time_s))
    return min(told, default=None)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(path))
    except OSError:
        return []


# What a run's own files say beside Slurm's state: that its training hangs, or has stopped before its end.


def hang_note(path: Path, now: State) -> HangReport | None:
    """The report of a hang in the run's folder `path`; None if it does not run, or goes on by now."""
    if now.name != "RUNNING":
        return None
    from hpcinit.records import hang_report  # noqa: PLC0415 - for runs that run

    return hang_report.left(path, now.job_id, now.restart)


def stop_note(path: Path, now: State, told: Mapping[str, Any] | None = None) -> str:
    """'time limit', 'preempted', ... of a run that has ended well before its last step; else ''.

    told: what progress.read() gives, if it has been read: a training that came to its end has not stopped.
    """
    if now.name != "COMPLETED":
        return ""
    try:
        if told and told["step"] >= told["total"]:
            return ""
        record = plain_files.read(path / run_folder.STOPPED)
        # Ranks of a task know its job by a number that is not the task's name '17_1', whose folder no other job has.
        own = record["job"] in ("", now.job_id) or "_" in now.job_id
        return sentence(record["reason"]) if own else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def notes(path: Path, now: State, told: Mapping[str, Any]) -> str:
    """For a person, in a line: '' where there is nothing to tell."""
    if report := hang_note(path, now):
        return f"the training hangs: {report.headline}"
    why = stop_note(path, now, told)
    return f"stopped before its end: {why}" if why else ""
