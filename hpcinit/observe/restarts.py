"""Reads the earlier attempts of a run from restarts.jsonl, for the commands that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcinit.base.text import counted
from hpcinit.records import elastic_restarts, run_folder
from hpcinit.records.requeues import Restart, read

__all__ = ["Restart", "read"]  # both are defined in records/requeues.py

REASONS = {
    run_folder.PREEMPTED: "preempted",
    run_folder.NODE_FAIL: "node failure",
    run_folder.HANG: "hung",
    run_folder.TIME_LIMIT: "time limit",
    run_folder.FAILURE: "failed",
    run_folder.SLURM: "requeued by Slurm",
}
MOST_SHOWN = 5


def left(found: Sequence[Restart]) -> int | None:
    """Return how many restarts the run's last job has left, or None if that isn't recorded.

    In a chain, each job has its own number of restarts.
    """
    last = found[-1] if found else None
    return None if last is None or last.max_restarts is None else max(0, last.max_restarts - last.restart)


def document(path: Path) -> Mapping[str, Any]:
    """Return the restarts for JSON output: the number of requeues, how many are left, and these two lists.

    attempts: the requeues.
    inside: the restarts inside a job.
    """
    found = read(path)
    return {
        "count": len(found),
        "left": left(found),
        "attempts": [{"job_id" if key == "job" else key: value for key, value in asdict(one).items()} for one in found],
        "inside": [asdict(one) for one in read_inside(path)],
    }


def summary(found: Sequence[Restart]) -> str:
    """Return the number of restarts as text, such as '2 restarts, 1 left', or '' if there were none."""
    if not found:
        return ""
    rest = left(found)
    return counted(len(found), "restart") + (f", {rest} left" if rest is not None else "")


def restarts_line(found: Sequence[Restart]) -> str:
    """Return a line about the restarts, or '' if there were none.

    An example is '2 restarts, 1 left: 1 hung (step 10), 2 preempted (step 20)'.
    """
    if not found:
        return ""
    ends = [f"{one.restart} {REASONS.get(one.reason, one.reason)}{_at(one)}" for one in found[-MOST_SHOWN:]]
    return f"{summary(found)}: {'... ' * (len(found) > MOST_SHOWN)}{', '.join(ends)}"


def read_inside(path: Path) -> list[elastic_restarts.Restart]:
    """Return the restarts that happened inside a job, with launch=torchrun or restart.warm."""
    return list(elastic_restarts.read(path))


def line_inside(found: Sequence[elastic_restarts.Restart]) -> str:
    """Return a line about the restarts inside the job, or '' if there were none.

    An example is '2 restarts inside the job: rank 3 on n2: Killed (step 41, 2.1 s to the next step), rank 0 ...'.
    """
    if not found:
        return ""
    ends = [f"{one}{_step_and_loss(one)}" for one in found[-MOST_SHOWN:]]
    return f"{summary_inside(found)}: {'... ' * (len(found) > MOST_SHOWN)}{', '.join(ends)}"


def summary_inside(found: Sequence[elastic_restarts.Restart]) -> str:
    """Return the number of restarts inside the job as text, such as '2 restarts inside the job', or ''."""
    return f"{counted(len(found), 'restart')} inside the job" if found else ""


def _step_and_loss(one: elastic_restarts.Restart) -> str:
    parts = [f"step {one.step}"] if one.step >= 0 else []
    if elastic_restarts.PHASES[-1] in one.phases:
        parts.append(f"{sum(one.phases.values()):.1f} s to the next step")
    return f" ({', '.join(parts)})" if parts else ""


def _at(one: Restart) -> str:
    return "" if one.step is None else f" (step {one.step})"
