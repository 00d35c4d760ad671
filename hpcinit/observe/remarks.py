"""What a run's own files say beside Slurm's state: that its training hangs, or has stopped before its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcinit.facts import plain_files, runfolder
from hpcinit.facts.stopping import sentence
from hpcinit.observe.state import State

if TYPE_CHECKING:
    from hpcinit.facts.hangs import HangReport


def hang(path: Path, now: State) -> HangReport | None:
    """The report of a hang in the run's folder `path`; None if it does not run, or goes on by now."""
    if now.name != "RUNNING":
        return None
    from hpcinit.facts import hangs  # noqa: PLC0415 - for runs that run

    return hangs.left(path, now.job_id, now.restart)


def stopped(path: Path, now: State, told: Mapping[str, Any] | None = None) -> str:
    """'time limit', 'preempted', ... of a run that has ended well before its last step; else ''.

    told: what progress.read() gives, if it has been read: a training that came to its end has not stopped.
    """
    if now.name != "COMPLETED":
        return ""
    try:
        if told and told["step"] >= told["total"]:
            return ""
        record = plain_files.read(path / runfolder.STOPPED)
        # Ranks of a task know its job by a number that is not the task's name '17_1', whose folder no other job has.
        own = record["job"] in ("", now.job_id) or "_" in now.job_id
        return sentence(record["reason"]) if own else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def words(path: Path, now: State, told: Mapping[str, Any]) -> str:
    """For a person, in a line: '' where there is nothing to tell."""
    if report := hang(path, now):
        return f"the training hangs: {report.headline}"
    why = stopped(path, now, told)
    return f"stopped before its end: {why}" if why else ""
