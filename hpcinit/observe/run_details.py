"""Collects what `status` and `watch` show about a run: the fields of its JSON document, and texts for people."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from hpcinit.base.errors import RequestError
from hpcinit.observe import find_runs, progress, requests, restarts
from hpcinit.observe.overview import Run
from hpcinit.observe.state import State
from hpcinit.records import job_record, results, world_size
from hpcinit.slurm import reasons

OLD_S = 60.0  # the age of the last step is shown if it is higher than this


def documents(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the JSON document of a run. For a sweep, yield one document per task."""
    for task in [run.task] if run.task else run.tasks:
        yield _fields(task.path, task.state, task)
    if run.now and not run.task:
        yield _fields(run.path, run.now)


def _fields(path: Path, now: State, task: find_runs.Task | None = None) -> dict[str, Any]:
    started = now.name not in ("PENDING", find_runs.NOT_SUBMITTED)
    ran = started or now.restart is not None  # then this attempt or an earlier one may have left files
    document = progress.read(path) if started else {}
    submission = requests.read(path)
    return {
        "run": str(path),
        "task": task.number if task else None,
        "combination": task.combination if task else "",
        "parameters": parameters(task) if task else {},
        "resubmitted": task.resubmitted if task else "",
        **now.to_json(),
        "clusters": job_record.clusters(path),
        "meaning": reasons.explain(now.reason),
        "progress": {key: value for key, value in document.items() if key != "not_finite"},
        "not_finite": document.get("not_finite", {}),
        "result": result(path) if ran else None,
        "submitted": submission.submitted,
        "typed": list(submission.typed),
        "arguments": list(submission.arguments),
        "restarts": restarts.document(path) if now.restart is not None else None,
        "step_age_s": progress.age_s(path, time.time()) if now.name == "RUNNING" else None,
        "hang": list(report.lines()) if (report := progress.hang_note(path, now)) else [],
        "stopped": progress.stop_note(path, now, document),
        "no_effect": list(progress.ineffective_options(path, now).no_effect) if now.name == "COMPLETED" else [],
        "warnings": [str(found)] if ran and (found := world_size.read(path)) else [],
    }


def parameters(task: find_runs.Task) -> dict[str, str]:
    """Return the values that distinguish this task of a sweep, by name."""
    return requests.parameters(task.given, requests.read(task.path).arguments)


def settings(task: find_runs.Task) -> str:
    """Return a text with the values that distinguish this task of a sweep, such as 'lr=0.1 width=8'."""
    return " ".join(f"{name}={value}" for name, value in parameters(task).items()) or task.combination


def again(task: find_runs.Task) -> str:
    """Return a text such as 'submitted again as train-0007', or '' if the task was not submitted again."""
    return f"submitted again as {task.resubmitted}" if task.resubmitted else ""


def job_of(run: Run) -> str:
    """Return the job id of the run, or a sweep's first job id."""
    if run.now:
        return run.now.job_id
    return next((now.job_id.partition("_")[0] for _, now in run.parts), "-")


def details(path: Path, now: State, table: bool = False) -> str:
    """Return the details of a job: why it is waiting, its times, its progress, and how it ended.

    table: whether the details are for a table. They then omit the times and the step, which have their own columns.
    """
    started = now.name not in ("PENDING", find_runs.NOT_SUBMITTED)
    again = now.restart is not None
    parts = [
        f"its run folder was deleted; cancel it: scancel {now.job_id}" if now.folder_deleted else "",
        "started manually" if now.by_hand else "",
        f"on {name}" if (name := job_record.clusters(path)) else "",
        now.link,
        now.reason,
        "" if table else times(now),
        restarts.summary(restarts.read(path)) if again else "",
        restarts.summary_inside(restarts.read_inside(path)) if again else "",
        "" if now.exit_status is None or (table and now.exit_status == 0) else f"exit status {now.exit_status}",
    ]
    if started:
        document = progress.read(path)
        result = result_text(path) if now.over else ""
        text = progress.summary(document, step=not table)
        parts += [text, age(path, now), result, progress.notes(path, now, document)]
    if (started or again) and (found := world_size.read(path)):
        parts.append(f"warning: {found.summary()}")
    return "  ".join(part for part in parts if part)


def result_text(path: Path) -> str:
    """Return the result of the run as text, such as 'result 0.25' or 'result 0.25, 3', or '' if it has none."""
    value = result(path)
    if value is None:
        return ""
    return "result " + ", ".join(f"{item:.4g}" for item in (value if isinstance(value, tuple) else (value,)))


def submitted(path: Path) -> str:
    """Return when the run was submitted, such as 'submitted 14:02', or ''. The date is included if it isn't today."""
    at = requests.submitted(path)
    return f"submitted {_clock(datetime.fromtimestamp(at), datetime.now())}" if at is not None else ""


def times(now: State) -> str:
    """Return how long a job has been running and how much time it has left, or when it will start, or ''.

    For a running job, the text is like 'for 1:02:03, 57:57 left'. For a waiting job, it is like 'starts about 14:02 (in
    0:12:00)'.
    """
    found = times_alone(now)
    return f"{'for' if now.name == 'RUNNING' else 'starts about'} {found}" if found else ""


def times_alone(now: State) -> str:
    """Return what times() returns, but without 'for' or 'starts about', for a column of the table."""
    if now.name == "RUNNING" and now.elapsed_s is not None:
        left = "" if now.left_s is None else f", {duration(now.left_s)} left"
        return f"{duration(now.elapsed_s)}{left}"
    if now.name == "PENDING" and now.start:
        return when(now.start, datetime.now())
    return ""


def when(start: str, now: datetime) -> str:
    """Return a start time as text, such as '14:02 (in 12:00)'. The date is included if it isn't today.

    start: the start time as Slurm prints it, such as '2026-11-21T14:02:00'.
    """
    try:
        at = datetime.fromisoformat(start)
    except ValueError:
        return start
    return _clock(at, now)


def _clock(at: datetime, now: datetime) -> str:
    left = (at - now).total_seconds()
    day = "" if at.date() == now.date() else f"{at:%Y-%m-%d} "
    return f"{day}{at:%H:%M}" + (f" (in {duration(left)})" if left > 0 else "")


def age(path: Path, now: State) -> str:
    """Return a text such as 'last step 5:12 ago' if the last step was more than OLD_S seconds ago, or ''."""
    if now.name != "RUNNING":
        return ""
    since = progress.age_s(path, time.time())
    return f"last step {duration(since)} ago" if since is not None and since > OLD_S else ""


def duration(seconds: float) -> str:
    """Return a duration as squeue writes it: '1-02:03:04', '2:03:04' or '3:04'."""
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def result(path: Path) -> results.Value | None:
    """Return the number or numbers in result.json, or None if it has none."""
    try:
        return results.read_numbers(path)
    except RequestError:
        return None
