"""Makes the ledger of a run folder: divides Slurm's allocations by the recorded start-up and training of the ranks."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files
from hpcinit.engine import from_record
from hpcinit.observe import state
from hpcinit.records import (
    elastic_restarts,
    hang_report,
    job_record,
    requeues,
    run_folder,
    scratch,
    timeline,
    training_spans,
)
from hpcinit.report import charges, ledger, startup_table
from hpcinit.report.ledger import Allocation, Segment, Start, exact
from hpcinit.report.startup_phases import Report

# For each event of the start-up, the row of the phase that ends with it.
ROW_OF = {
    "started": ledger.START,
    "spawned": ledger.START,
    "interpreter": ledger.START,
    "forked": ledger.IMPORTS,
    "met": ledger.INIT,
    "imported": ledger.IMPORTS,
    **dict.fromkeys(("device", "store", "joined", "collective", "up"), ledger.INIT),
}
ROW_OF_SPAN = {
    training_spans.BUILD: ledger.INIT,
    training_spans.FIRST: ledger.FIRST,
    training_spans.STEPS: ledger.KEPT,
    training_spans.SAVING: ledger.SAVE,
    training_spans.LOADING: ledger.RESTORE,
}
GPUS_OF_SCRIPT = re.compile(r"^#SBATCH --gpus-per-node=(?:\w+:)?(\d+)", re.MULTILINE)
NODES_OF_SCRIPT = re.compile(r"^#SBATCH --nodes=(\d+)", re.MULTILINE)
SILENCE_STEPS, SILENCE_S = 10, 60.0  # a failed start that was silent for longer had a hang
CLOCK_S = 2.0  # tolerance, because Slurm and the batch script record whole seconds


def read(run: Path, known: Mapping[str, Sequence[Allocation]] | None = None) -> list[Allocation]:
    """Return the allocations of the run in the folder `run`, with their segments.

    Raise RequestError if it is not the folder of a run.
    known: the allocations that sacct lists, by job id, or None to query sacct.
    """
    record = job_record.submission(run)
    jobs = job_record.jobs(record)
    reports = startup_table.gather_reports(run)
    starts = [report.attempt for report in reports]
    found: list[Allocation] = []
    if from_record(record).uses_slurm:
        listed = {job for job in (*jobs, job_record.last_job(run)) if job}
        if known is None:
            found = charges.of_jobs(sorted(listed))
        else:
            found = sorted((one for job in listed for one in known.get(job, ())), key=lambda one: one.begin)
    found = found or _without_accounting(run, record, starts)
    return ledger.with_repeats(_with_reasons(run, [_with_starts(run, one, found, reports) for one in found]))


def _without_accounting(run: Path, record: Mapping[str, Any], starts: Sequence[timeline.Attempt]) -> list[Allocation]:
    """Return the allocations according to the records in the run folder. Omit those in which no rank started."""
    ends = {(one.job, one.restart - 1): float(one.time) for one in requeues.read(run)}
    last = safe_files.json_or_empty(run / run_folder.EXIT)
    if "ended" in last:
        ends[str(last.get("job", "")), int(last.get("restart", 0))] = float(last["ended"])
    script = safe_files.read_or_empty(run / run_folder.SCRIPT)
    per_node, nodes = GPUS_OF_SCRIPT.search(script), NODES_OF_SCRIPT.search(script)
    groups: dict[tuple[str, int], list[timeline.Attempt]] = {}
    for one in starts:
        groups.setdefault((one.job.partition(".")[0], one.restart), []).append(one)
    found: list[Allocation] = []
    queued_from = record.get("submitted")
    for (job, restart), own in groups.items():
        begins = [one for start in own for one in (_allocated(start), timeline.begun(start)) if one is not None]
        if not begins:
            continue
        begin = min(begins)
        name = job if (job, restart) in ends else str(record["job_id"])
        end = ends.get((name, restart), ends.get((job, restart)))
        if end is None:
            end = max([begin, *(_last_sign(run, start) for start in own)])
            if state.read(run).name == "RUNNING" and own[-1] is starts[-1]:
                end = time.time()
        number = int(nodes[1]) if nodes else own[0].nodes
        gpus = int(per_node[1]) * number if per_node else 0
        queued_s = None if not isinstance(queued_from, int | float) else max(0.0, begin - queued_from)
        found.append(Allocation(job, restart, begin, max(begin, end), float(gpus or number), gpus, number, queued_s))
        queued_from = end
    return sorted(found, key=lambda one: one.begin)


def _last_sign(run: Path, start: timeline.Attempt) -> float:
    """Return the last time at which the ranks of a start certainly ran, from its events, spans and heartbeats."""
    name = scratch.folder_name(start.job)
    files = [*(run / "heartbeats" / name).glob("*.json"), *(run / run_folder.TIMELINE / name).glob("*")]
    seen = [path.stat().st_mtime for path in files]
    return max([*seen, *(event for rank in start.ranks for event in rank.events.values())], default=0.0)


def _allocated(start: timeline.Attempt) -> float | None:
    return min((rank.events["allocated"] for rank in start.ranks if "allocated" in rank.events), default=None)


def _with_starts(run: Path, one: Allocation, every: Sequence[Allocation], reports: Sequence[Report]) -> Allocation:
    """Add the starts of the ranks to the allocation `one`. Each one lasts until the next.

    every: all allocations of the run.
    reports: the start-up reports of the whole run.
    """
    begins = [(_begin(report.attempt), report) for report in reports]
    own = [(begin, report) for begin, report in begins if begin is not None and _place(begin, every) is one]
    if not own:
        segment = Segment(ledger.START, exact(one.begin), exact(one.end))
        ran = not reports and one.state == "COMPLETED"  # the ranks ran, but could not write their timeline
        return replace(one, starts=() if ran else (Start((segment,)),))
    bounds = [one.begin, *(min(max(begin, one.begin), one.end) for begin, _ in own[1:]), one.end]
    found = [
        _start(run, report, begin, end, one, reports)
        for (_, report), begin, end in zip(own, bounds, bounds[1:], strict=False)
    ]
    return replace(one, starts=tuple(found))


def _begin(start: timeline.Attempt) -> float | None:
    allocated = _allocated(start)
    return timeline.begun(start) if allocated is None else allocated


def _place(begin: float, every: Sequence[Allocation]) -> Allocation | None:
    """Return the allocation to which a start belongs, given its start time. Return None if there are no allocations."""
    return next((one for one in reversed(every) if one.begin <= begin + CLOCK_S), every[0] if every else None)


def _uses_init(report: Report) -> bool:
    return any("imported" in rank.events for rank in report.attempt.ranks)


def _start(run: Path, report: Report, begin: float, end: float, one: Allocation, reports: Sequence[Report]) -> Start:
    start = report.attempt
    uses_init = any(map(_uses_init, reports))
    rows, ready = _startup_rows(start, begin, end, uses_init)
    segments: list[Segment] = []
    at = begin
    for row, seconds in rows.items():
        if seconds:
            segments.append(Segment(row, exact(at), exact(at + seconds)))
            at += seconds
    hang = _hang(run, start.job)
    stopped = any(rank.returned is not None for rank in start.ranks)
    resumed = -1
    if ready is not None and at < end:
        if start.spans:
            trained, resumed = _training(start.spans, at, end, hung=bool(hang), stopped=stopped, state=one.state)
            segments += trained
        else:
            segments.append(Segment(ledger.UNKNOWN, exact(at), exact(end)))
    used = min(1.0, start.nodes / one.nodes) if one.nodes else 1.0
    fault = str(hang.get("host") or "") if hang else ""
    fault = fault or next((found.host for found in elastic_restarts.read(run) if found.job == start.job), "")
    return Start(tuple(ledger.merged(segments)), used, resumed, 0, stopped, fault, report)


def _startup_rows(
    start: timeline.Attempt, begin: float, end: float, uses_init: bool
) -> tuple[dict[str, float], float | None]:
    """Return the average seconds per rank in each row of the start-up, and the average time at which init() returned.

    The time is None if init() returned on no rank. If a rank did not complete the start-up, its remaining time counts
    for the phase in which it was.

    uses_init: whether the program calls hpcinit.init() in any start of the run.
    """
    rows = {ledger.START: 0.0, ledger.IMPORTS: 0.0, ledger.INIT: 0.0, ledger.UNKNOWN: 0.0}
    ready = [rank.events[timeline.LAST] for rank in start.ranks if timeline.LAST in rank.events]
    until = end if not ready else min(end, max(begin, sum(ready) / len(ready)))
    for rank in start.ranks:
        at = begin
        for name, event in rank.events.items():
            if name in ROW_OF:
                then = min(max(event, at), until)
                rows[ROW_OF[name]] += then - at
                at = then
        names = list(timeline.EVENTS)
        following = names[names.index(rank.furthest) + 1] if rank.furthest not in ("", timeline.LAST) else ""
        row = ROW_OF.get(following, ledger.START if not rank.furthest else ledger.INIT)
        if not uses_init and rank.furthest == "met":
            row = ledger.UNKNOWN  # the program runs, but does not call init()
        rows[row] += until - at
    rows[ledger.START] += (start.world_size - len(start.ranks)) * (until - begin)
    size = max(start.world_size, len(start.ranks))
    return {row: seconds / size for row, seconds in rows.items()}, until if ready else None


def _training(
    spans: Sequence[training_spans.Span], begin: float, end: float, *, hung: bool, stopped: bool, state: str
) -> tuple[list[Segment], int]:
    """Return the segments between `begin` and `end`, from the recorded spans, and the step from which training
    continued.

    hung: whether a hang was reported.
    stopped: whether the program of a rank exited with status 0.
    state: the state of the allocation in sacct.
    """
    segments: list[Segment] = []
    paces = [
        (one.end - one.begin) / one.number
        for one in spans
        if one.what == training_spans.STEPS and one.number and one.end > one.begin
    ]
    usual = statistics.median(paces) if paces else 0.0
    at, resumed = begin, -1
    stepped = max(
        (number for number, one in enumerate(spans) if one.what == training_spans.STEPS and one.number), default=-1
    )
    for number, one in enumerate(spans):
        until = min(max(at, one.end or (one.begin if one.what == training_spans.STEPS else end)), end)
        if number + 1 < len(spans):
            until = min(max(at, spans[number + 1].begin), end)
        row = ROW_OF_SPAN.get(one.what, ledger.PHASES)
        if row == ledger.KEPT and number > stepped:  # before its exit, the program waits for a save in the background
            row = ledger.END
        if row == ledger.RESTORE:
            resumed = max(resumed, one.last)
        if row == ledger.FIRST and number + 1 < len(spans) and spans[number + 1].what == training_spans.STEPS:
            # The end of the first step, as long as a usual step, counts as a step.
            cut = max(at, until - usual)
            segments += _first(segments, at, cut)
            first = spans[number + 1].first
            before = resumed if resumed >= 0 else first - 1 if first > 0 else first
            segments.append(Segment(ledger.KEPT, exact(cut), exact(until), before, first, 1))
            resumed = before if resumed < 0 else resumed
        else:
            known = row in (ledger.KEPT, ledger.SAVE, ledger.RESTORE)
            span = (one.first, one.last, one.number) if known else (-1, -1, 0)
            segments.append(Segment(row, exact(at), exact(until), *span))
        at = until
    return [*segments, *tail(spans[-1].what, at, end, usual, hung=hung, stopped=stopped, state=state)], resumed


def _first(before: Sequence[Segment], begin: float, end: float) -> list[Segment]:
    """Return the segments before the first step: building the model, and the extra time of the first step.

    No record shows the boundary between the two. If `before` already contains the building of the model, return only
    the extra time.
    """
    if any(one.row in (ledger.INIT, ledger.RESTORE) for one in before):
        return [Segment(ledger.FIRST, exact(begin), exact(end))]
    cut = ledger.Time((begin + end) / 2, begin, end)
    return [Segment(ledger.INIT, exact(begin), cut), Segment(ledger.FIRST, cut, exact(end))]


def tail(what: str, begin: float, end: float, usual: float, *, hung: bool, stopped: bool, state: str) -> list[Segment]:
    """Return the segments after the last recorded span: a hang, or an unfinished step and then the end.

    what: what the rank did in that span.
    usual: how many seconds a step usually takes.
    hung, stopped, state: as for _training().
    """
    if begin >= end:
        return []
    failed = not stopped and state != "COMPLETED"
    silent = end - begin > max(SILENCE_S, SILENCE_STEPS * usual)
    if hung or (failed and silent and what == training_spans.STEPS):
        return [Segment(ledger.HANG, exact(begin), exact(end))]
    if not failed or what != training_spans.STEPS:
        return [Segment(ledger.END, exact(begin), exact(end))]
    cut = min(end, begin + usual)
    return [Segment(ledger.REPEATED, exact(begin), exact(cut)), Segment(ledger.END, exact(cut), exact(end))]


def _hang(run: Path, job: str) -> dict[str, Any]:
    """Return the hang report of the attempt `job` as a dict, or {} if there is none."""
    name = scratch.folder_name(job)
    below = run / run_folder.HANG_REPORTS
    for folder in (
        below / name,
        below / f"{elastic_restarts.ASIDE}{name}",
        *below.glob(f"{elastic_restarts.ASIDE}*/{name}"),
    ):
        if found := safe_files.json_or_empty(folder / hang_report.RECORD):
            return found
        if (folder / hang_report.NO_STEPS).exists():
            return {"host": ""}
    return {}


def _with_reasons(run: Path, found: Sequence[Allocation]) -> list[Allocation]:
    """Return the allocations, each with the reason for its end, from hpcinit's records if they contain it."""
    reasons = {(one.job, one.restart - 1): one.reason for one in requeues.read(run)}
    return [replace(one, reason=reasons.get((one.job, one.restart), one.reason)) for one in found]
