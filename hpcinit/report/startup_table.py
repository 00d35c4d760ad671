"""Makes the start-up table: how long each phase of a start took, and which ranks were slow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted
from hpcinit.records import job_record, requeues, timeline
from hpcinit.records.timeline import Attempt
from hpcinit.report import startup_phases
from hpcinit.report.startup_phases import Phase, Report, seconds

HEAD = ("phase", "min", "median", "max", "ends within", "slow ranks, or the last rank if all waited for it")


def headline(report: Report) -> str:
    """Return the first line, such as 'job 43.0.0: 4 ranks on 2 nodes (slurm), started ..., ready after 12.3 s'."""
    attempt = report.attempt
    start = timeline.begun(attempt)
    at = f", started {datetime.fromtimestamp(start):%Y-%m-%d %H:%M:%S}" if start else ""
    shape = f"{counted(attempt.world_size, 'rank')} on {counted(attempt.nodes, 'node')} ({attempt.launcher})"
    ends = [rank.events[timeline.LAST] for rank in attempt.ranks if timeline.LAST in rank.events]
    if startup_phases.before_init(report):
        return f"job {attempt.job}: {shape}{at}, the program has not called hpcinit.init()"
    ready = f", ready after {seconds(max(ends) - start)}" if attempt.complete and start else ", not all ranks are ready"
    return f"job {attempt.job}: {shape}{at}{ready}"


def row(report: Report, phase: Phase) -> tuple[str, ...]:
    """Return the row of the start-up table for a phase. Its columns are those in HEAD."""
    last = startup_phases.waited_for(report, phase)
    about = startup_phases.list_slow(startup_phases.slow_phases(report, phase))
    if last:
        about = f"last: {last[0]}, {seconds(last[1])} after half of the ranks"
    name = f"{phase.name}{' *' * phase.waits}"
    spread = "" if phase.ends == startup_phases.QUEUE else seconds(phase.spread)
    return (name, seconds(phase.least), seconds(phase.median), seconds(phase.most), spread, about)


def notes(report: Report) -> Iterator[str]:
    """Yield the lines below the start-up table, about missing ranks, the timeout and the clocks."""
    yield from startup_phases.missing_ranks(report)
    if any(phase.waits for phase in report.phases):
        yield "* a rank mostly waits for other ranks in these phases"
    yield from (line for line in (timeout(report), clock_lines(report)) if line)


def timeout(report: Report) -> str:
    """Return a line that shows how the start-up timeout was computed, and the longest wait of a rank.

    Return '' if the calculation is unknown.
    """
    attempt = report.attempt
    if not attempt.formula:
        return ""
    waited = attempt.waited_s
    used = ""
    if waited is not None and attempt.timeout_s and attempt.complete:
        used = f"; the longest wait was {seconds(waited)}, {waited / attempt.timeout_s:.0%} of the timeout"
    return f"start-up timeout: {attempt.formula}{used}"


def clock_lines(report: Report) -> str:
    """Return a line about the nodes with a corrected clock or an unknown clock, or '' if there are none."""
    parts = []
    if off := {host: clock for host, clock in report.clocks.items() if clock.offset_s}:
        worst = max(off, key=lambda host: abs(off[host].offset_s))
        largest = f"{worst} by {-off[worst].offset_s:+.3f} s, accurate to {seconds(off[worst].within_s)}"
        count = f"corrected the clock{'s' * (len(off) > 1)} of {counted(len(off), 'node')}"
        parts.append(f"{count} (relative to rank 0's node), the largest difference: {largest}")
    if unknown := sorted(set(report.hosts.values()) - report.clocks.keys()):
        parts.append(f"no comparison with the clock{'s' * (len(unknown) > 1)} of {', '.join(unknown[:4])}")
    return "; ".join(parts)


def report_lines(report: Report) -> Iterator[str]:
    """Yield the start-up report as plain lines, which are printed if stdout is not a terminal."""
    yield headline(report)
    rows = [HEAD, *(row(report, phase) for phase in report.phases)]
    widths = [max(len(line[column]) for line in rows) for column in range(len(HEAD) - 1)]
    for line in rows:
        name, *numbers = (
            text.ljust(width) if not at else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=False))
        )
        yield f"  {name}  {'  '.join(numbers)}  {line[-1]}".rstrip()
    yield from notes(report)


def document(report: Report) -> dict[str, Any]:
    """Return the start-up report as a JSON document. Events are in seconds since 1970, by rank 0's clock."""
    attempt = report.attempt
    return {
        "job": attempt.job,
        "launcher": attempt.launcher,
        "world_size": attempt.world_size,
        "nodes": attempt.nodes,
        "complete": attempt.complete,
        "absent": attempt.absent,
        "silent_nodes": report.silent_hosts,
        "missing": startup_phases.missing_ranks(report),
        "timeout_s": attempt.timeout_s,
        "formula": attempt.formula,
        "waited_s": attempt.waited_s,
        "clocks": {
            host: {"offset_s": clock.offset_s, "within_s": clock.within_s} for host, clock in report.clocks.items()
        },
        "phases": [_phase(report, phase) for phase in report.phases],
        "ranks": [
            {"rank": rank.rank, "host": rank.host, "local_rank": rank.local_rank, "moments": dict(rank.events)}
            for rank in attempt.ranks
        ],
    }


def _phase(report: Report, phase: Phase) -> dict[str, Any]:
    last = startup_phases.waited_for(report, phase)
    return {
        "name": phase.name,
        "ends": phase.ends,
        "waits": phase.waits,
        **{"min_s": phase.least, "median_s": phase.median, "max_s": phase.most, "spread_s": phase.spread},
        "slowest": [_slow(one) for one in startup_phases.slow_phases(report, phase)],
        "waited_for": {**_slow(last[0]), "behind_s": last[1]} if last else None,
    }


def _slow(one: startup_phases.SlowPhase) -> dict[str, Any]:
    ranks: Sequence[int] = one.ranks
    return {"host": one.host, "ranks": list(ranks), "whole_node": one.whole, "took_s": one.took}


TASK = "task"


def gather_reports(run: Path) -> list[Report]:
    """Return the start-up report of each start of the run, in order, or [] if no rank wrote a timeline."""
    submissions = dict(_submission_times(run))
    seen: set[str] = set()
    found = []
    for attempt in timeline.read(run):
        key = _job_and_restart(attempt)
        key = key if key in submissions else f"{TASK}.{attempt.restart}"
        # Ranks that restart inside a job did not wait in the queue.
        submitted = None if key in seen else submissions.get(key)
        seen.add(key)
        found.append(startup_phases.startup_phases(_with_submission(attempt, submitted)))
    return found


def _job_and_restart(attempt: Attempt) -> str:
    return f"{attempt.job.partition('.')[0].partition('+')[0]}.{attempt.restart}"


def _with_submission(attempt: Attempt, submitted: float | None) -> Attempt:
    """Add the time of submission to each rank of `attempt`.

    If this time is unknown or later than the start of the job, change nothing. Slurm may start a job before its
    submission is recorded.

    Slurm 24.11 rounds the start time down to a full second. So if the job was submitted in that second, use the start
    time as the time of submission.
    """
    if submitted is None:
        return attempt
    ranks = []
    for rank in attempt.ranks:
        at = rank.events.get("allocated", 0.0)
        events = {"submitted": min(submitted, at), **rank.events}
        ranks.append(replace(rank, events=events) if int(submitted) <= at else rank)
    return replace(attempt, ranks=tuple(ranks))


def _submission_times(run: Path) -> Iterator[tuple[str, float]]:
    """Yield ('JOB.RESTART', when it was submitted or requeued, in seconds since 1970) for each attempt of the run."""
    with contextlib.suppress(RequestError, KeyError, TypeError, ValueError):
        record = job_record.submission(run)
        at = float(record["submitted"])
        yield from ((f"{_number(job)}.0", at) for job in job_record.jobs(record))
    yield from ((f"{_number(one.job)}.{one.restart}", one.time) for one in requeues.read(run))


def _number(job: str) -> str:
    """Return the job id that the ranks of `job` record. For an array task, return TASK.

    The ranks of an array task, such as '18_1', record a different job id, such as 19.
    """
    return TASK if "_" in job else job
