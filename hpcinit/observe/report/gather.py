"""All starts of a run, from its folder: what the ranks wrote, and when the job was handed to Slurm."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcinit.facts import runfolder, spec, timeline
from hpcinit.facts.errors import HpcinitError, RequestError
from hpcinit.facts.timeline import Attempt
from hpcinit.observe import state
from hpcinit.observe.report import phases
from hpcinit.observe.report.phases import Report

TASK = "task"


def reports(run: Path) -> list[Report]:
    """One for each start of the ranks, the first first. Raises RequestError if none has left a line."""
    attempts = timeline.read(run)
    if not attempts:
        record = state.submission(run)
        raise RequestError(
            f"{run} has no {runfolder.TIMELINE}/ with a rank's line in it: job {record['job_id']} has not started yet, "
            f"or its ranks could not write there (hpcinit why says more), or it was submitted by an older hpcinit"
        )
    handed = dict(_handed_over(run))
    seen: set[str] = set()
    found = []
    for attempt in attempts:
        key = _job_and_restart(attempt)
        key = key if key in handed else f"{TASK}.{attempt.restart}"
        submitted = None if key in seen else handed.get(key)  # ranks that begin again in the same job wait for nothing
        seen.add(key)
        found.append(phases.of(_with_law(_with_submission(attempt, submitted), run)))
    return found


def _job_and_restart(attempt: Attempt) -> str:
    return f"{attempt.job.partition('.')[0].partition('+')[0]}.{attempt.restart}"


def _with_submission(attempt: Attempt, submitted: float | None) -> Attempt:
    """A job that begins while its submission is still writing its record is not shown as one that waited.

    Slurm 24.11 says itself when the nodes were there, in whole seconds (SLURM_JOB_START_TIME): not before it was asked.
    """
    if submitted is None:
        return attempt
    ranks = []
    for rank in attempt.ranks:
        at = rank.moments.get("allocated", 0.0)
        moments = {"submitted": min(submitted, at), **rank.moments}
        ranks.append(replace(rank, moments=moments) if int(submitted) <= at else rank)
    return replace(attempt, ranks=tuple(ranks))


def _with_law(attempt: Attempt, run: Path) -> Attempt:
    """Where rank 0 did not come to say it: the submission's, without what was left of the job."""
    if attempt.law:
        return attempt
    try:
        law = spec.load(run / runfolder.SPEC, to_run=False).comm.timeout
        limit, text = law.start_up(attempt.nodes).total_seconds(), law.formula(attempt.nodes)
    except HpcinitError:
        return attempt
    return replace(attempt, timeout_s=limit, law=f"{text} (rank 0 did not come to say it)")


def _handed_over(run: Path) -> Iterator[tuple[str, float]]:
    """('JOB.RESTART', when it came to Slurm), in seconds since 1970."""
    with contextlib.suppress(RequestError, KeyError, TypeError, ValueError):
        record = state.submission(run)
        at = float(record["submitted"])
        yield from ((f"{_number(job)}.0", at) for job in state.jobs(record))
    for line in _lines(run / runfolder.RESTARTS):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            yield f"{_number(line['job'])}.{int(line['restart'])}", float(line["time"])


def _number(job: str) -> str:
    """Of a task of an array, '18_1', whose number of its own only its ranks were told: TASK."""
    return TASK if "_" in job else job


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                yield document
