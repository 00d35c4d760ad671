"""Reads the progress that a program reported with `run.progress()`, and describes early stops and hangs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcinit.base import safe_files
from hpcinit.observe.state import State
from hpcinit.records import heartbeats, run_folder
from hpcinit.records.stop_reasons import sentence

if TYPE_CHECKING:
    from hpcinit.records.hang_report import HangReport
    from hpcinit.records.program_use import ProgramUse


def read(path: Path) -> dict[str, Any]:
    """Return the recorded progress of the run in `path`, or {} if there is no readable record.

    The keys are step, total, values ({name: number}) and time.
    """
    document = safe_files.json_or_empty(f"{path}/{run_folder.PROGRESS}")
    return document if {"step", "total", "values"} <= document.keys() else {}


def line(path: Path) -> str:
    """Return the progress as text, such as 'step 20/60  loss 2.31', or '' if none is recorded."""
    return summary(read(path))


def summary(document: Mapping[str, Any], step: bool = True) -> str:
    """Return the progress as text, such as 'step 20/60  loss 2.31', with a note on values that are not finite.

    document: what read() returned.
    step: whether to include the step.
    """
    if not document:
        return ""
    first = [f"step {document['step']}/{document['total']}"] if step else []
    parts = [*first, *values(document), not_finite_note(document)]
    return "  ".join(part for part in parts if part)


def values(document: Mapping[str, Any]) -> list[str]:
    """Return the reported values as texts, such as ['loss 2.31', 'lr 0.0003'].

    document: what read() returned.
    """
    return [
        f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} {value}"
        for name, value in document.get("values", {}).items()
    ]


def age_s(path: Path, now_s: float) -> float | None:
    """Return how many seconds ago the run finished its last step, or None if that is unknown.

    This is the latest step in the heartbeats of all ranks and in rank 0's `run.progress()`.
    """
    attempts = [entry for entry in _entries(path / heartbeats.FOLDER) if entry.is_dir()]
    last = max(attempts, key=lambda entry: entry.stat().st_mtime, default=None)
    ages = [
        max(0.0, now_s - node.time) + heartbeat.silent_s
        for node in (heartbeats.read(Path(last.path)) if last else [])
        for heartbeat in node.heartbeats
        if heartbeat.silent_s is not None
    ]
    time_s = read(path).get("time")
    if isinstance(time_s, int | float):
        ages.append(max(0.0, now_s - time_s))
    return min(ages, default=None)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(path))
    except OSError:
        return []


def hang_note(path: Path, now: State) -> HangReport | None:
    """Return the hang report in the run folder, or None if the job is not running or is making progress again."""
    if now.name != "RUNNING":
        return None
    from hpcinit.records import hang_report  # noqa: PLC0415 - only needed for a running job

    return hang_report.left(path, now.job_id, now.restart)


def not_finite_note(document: Mapping[str, Any]) -> str:
    """Return a note on values that were not finite, such as 'loss is nan, first at step 20', or ''.

    The note also names values that have become finite again.

    document: what read() returned.
    """
    now = not_finite(document)
    first = document.get("not_finite")
    return ", ".join(
        f"{name} is {now[name]}, first at step {step}" if name in now else f"{name} was not finite at step {step}"
        for name, step in (first.items() if isinstance(first, dict) else ())
    )


def not_finite(document: Mapping[str, Any]) -> dict[str, float]:
    """Return the latest values that are NaN or infinite.

    document: what read() returned.
    """
    latest = document.get("values", {}).items()
    return {name: value for name, value in latest if isinstance(value, float) and not math.isfinite(value)}


def silence_note(path: Path, now: State) -> str:
    """Return a note such as 'no rank has printed anything for 4 min', or ''.

    Only a run whose program reports no steps gets this note.
    """
    from hpcinit.records import hang_report  # noqa: PLC0415 - only needed for a running job

    report = hang_report.without_output(path, now.job_id, now.restart, time.time())
    return report.lines()[0] if report else ""


def stop_note(path: Path, now: State, document: Mapping[str, Any] | None = None) -> str:
    """Return why a run that succeeded stopped before its last step ('time limit', 'preempted', ...), or ''.

    document: what read() returned. It shows whether the run reached its last step.
    """
    record = safe_files.json_or_empty(path / run_folder.STOPPED) if now.name == "COMPLETED" else {}
    try:
        if not record or (document and document["step"] >= document["total"]):
            return ""
        # Ranks of an array task record another job id than '17_1'. The record is of this task, because no other task
        # uses the folder.
        own = record["job"] in ("", now.job_id) or "_" in now.job_id
        return sentence(record["reason"]) if own else ""
    except (KeyError, TypeError):
        return ""


def notes(path: Path, now: State, document: Mapping[str, Any]) -> str:
    """Return one line about a hang, silent ranks, an early stop or options without effect, or ''.

    document: what read() returned.
    """
    if report := hang_note(path, now):
        return f"the training hangs: {report.headline}"
    if now.name == "RUNNING" and not document and (silence := silence_note(path, now)):
        return silence
    why = stop_note(path, now, document)
    unused = ineffective_options(path, now).note if now.name == "COMPLETED" else ""
    parts = [f"stopped before its end: {why}" if why else "", unused]
    return "; ".join(part for part in parts if part)


def ineffective_options(path: Path, now: State) -> ProgramUse:
    """Return which options of the run had no effect.

    If the run did not succeed, return no options, because it may have ended before it used them.
    """
    from hpcinit.records import program_use  # noqa: PLC0415 - imports the spec, which a waiting run does not need

    used = program_use.ProgramUse(program_use.WRAP)
    return (program_use.read(path) or used) if now.name == "COMPLETED" else used
