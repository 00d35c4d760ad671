"""The true rows of a run, as docs/reference/report.md defines them, from what its processes recorded and from sacct."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

SACCT = ("JobID", "State", "Submit", "Start", "End", "ElapsedRaw", "NNodes")
SILENT_S, SILENT_STEPS = 60.0, 10  # a failed attempt that was silent for so long counts as a hang


@dataclass
class Process:
    """What a process recorded. died: when its pid ended, as another process saw it."""

    rank: int
    pid: int
    started: float
    first: float
    tags: dict[str, str]
    marks: list[dict[str, Any]]
    python: float | None = None
    died: float | None = None

    def at(self, kind: str) -> float | None:
        return next((mark["at"] for mark in self.marks if mark["kind"] == kind), None)

    @property
    def last(self) -> float:
        return self.died if self.died is not None else max(mark["at"] for mark in self.marks)


@dataclass
class Allocation:
    """A job, or an attempt of a requeued job, as sacct shows it."""

    job: str
    state: str
    submit: float
    start: float
    end: float
    elapsed: float
    nodes: int


@dataclass
class Step:
    number: int
    seconds: float


@dataclass
class Start:
    """One start of the ranks: its time, its seconds by row, and its steps, which are kept or repeated."""

    begin: float
    end: float
    rows: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def add(self, row: str, seconds: float) -> None:
        self.rows[row] = self.rows.get(row, 0.0) + seconds


def seconds_of(text: str) -> float:
    """Return the time of a field of sacct, which is in this machine's time zone."""
    return datetime.fromisoformat(text).timestamp()


def allocations(sacct: str) -> list[Allocation]:
    """Read the output of `sacct -X -D --parsable2 --noheader` with the fields SACCT."""
    found = []
    for line in sacct.splitlines():
        job, state, submit, start, end, elapsed, nodes = line.split("|")
        if "T" not in start or "T" not in end:
            continue  # it never had nodes
        found.append(
            Allocation(
                job, state, seconds_of(submit), seconds_of(start), seconds_of(end), float(elapsed), int(nodes)
            )
        )  # fmt: skip
    return sorted(found, key=lambda each: (each.start, each.job))


def processes(folder: Path) -> list[Process]:
    """Read the files of record.py."""
    pythons: dict[int, list[float]] = {}
    listed = folder / "pythons.txt"
    for line in listed.read_text().splitlines() if listed.exists() else ():
        pid, at = line.split()
        pythons.setdefault(int(pid), []).append(float(at))
    deaths: dict[str, float] = {}
    seen = folder / "deaths.jsonl"
    for line in seen.read_text().splitlines() if seen.exists() else ():
        death = json.loads(line)
        deaths[death["file"]] = death["at"]
    found = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        marks = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if len(marks) < 2:
            continue
        head, first = marks[0], marks[1]["at"]
        own = [at for at in pythons.get(head["pid"], ()) if head["at"] - 1 <= at <= first]
        found.append(
            Process(
                head["rank"], head["pid"], head["at"], first, head, marks[2:] or [marks[1]],
                min(own, default=None), deaths.get(path.name),
            )
        )  # fmt: skip
    return sorted(found, key=lambda each: each.started)


def _starts_of(allocation: Allocation, all_processes: Sequence[Process]) -> list[list[Process]]:
    """Return the processes of the allocation, by the starts of the ranks."""
    groups: dict[tuple[str, str], list[Process]] = {}
    for each in all_processes:
        of_job = each.tags["SLURM_JOB_ID"] == allocation.job
        if of_job and allocation.start - 1.5 <= each.started <= allocation.end + 1.5:
            key = (each.tags["SLURM_STEP_ID"], each.tags["TORCHELASTIC_RESTART_COUNT"])
            groups.setdefault(key, []).append(each)
    return sorted(groups.values(), key=lambda group: min(each.started for each in group))


def _start_rows(start: Start, group: Sequence[Process]) -> tuple[Process | None, float]:
    """Fill in the rows before training: means over the ranks. Return rank 0 and where its own time line starts."""
    zero = next((each for each in group if each.rank == 0), None)
    firsts = [each.python if each.python is not None else each.started for each in group]
    first = statistics.mean(firsts)
    start.add("start", first - start.begin)
    calls = [each.at("init_call") for each in group]
    if zero is None or zero.at("init_call") is None or None in calls:
        last = zero.last if zero else max(each.last for each in group)
        start.add("imports", max(0.0, last - first))
        return None, max(first, last)
    called = statistics.mean(each for each in calls if each is not None)
    start.add("imports", called - first)
    ready = zero.at("init")
    if ready is None:
        start.add("init", zero.last - called)
        return None, zero.last
    built = zero.at("wrap") or ready
    start.add("init", built - called)
    return zero, built


def _training_rows(start: Start, zero: Process, cursor: float) -> tuple[float, str]:
    """Walk through rank 0's events. Return the end of the last one, and the row that was interrupted, or 'done'."""
    pending, inside = 0.0, "first_step"
    opened = {"load+": "restore", "save+": "save", "phase+": "evaluation"}
    closes = {"load-": "restore", "save-": "save", "phase-": "evaluation"}
    durations: list[Step] = []
    for mark in zero.marks:
        kind, at = mark["kind"], min(mark["at"], start.end)  # after scancel, sacct charges nothing
        if kind == "step":
            durations.append(Step(mark["step"], at - cursor + pending))
            pending, cursor, inside = 0.0, at, "steps_repeated"
        elif kind in opened:
            pending += at - cursor
            cursor, inside = at, opened[kind]
        elif kind in closes:
            start.add(closes[kind], at - cursor)
            cursor, inside = at, "steps_repeated" if durations else "first_step"
        elif kind == "done":
            inside = "done"
    if durations:
        charged = [each.seconds for each in durations[1:] if each.seconds > 0]
        usual = statistics.median(charged or [durations[0].seconds])
        over = max(0.0, durations[0].seconds - usual)
        start.add("first_step", over)
        durations[0].seconds -= over
    else:
        start.add("first_step", pending)
        pending = 0.0
    start.steps = durations
    start.add("end" if inside == "done" else "steps_repeated", pending)
    return cursor, inside


def _end_rows(start: Start, zero: Process, group: Sequence[Process], cursor: float, inside: str, hang_s: float) -> None:
    """Attribute the time after the last event of rank 0."""
    rest = start.end - cursor
    if inside == "done":
        start.add("end", rest)
        return
    hung = any(each.at("hang") is not None for each in group)
    usual = statistics.median(each.seconds for each in start.steps) if start.steps else 0.0
    died = min(zero.at("raised") or zero.last, zero.last, start.end)
    silent = max(0.0, died - cursor)
    if hung and start.steps and (silent >= hang_s or (silent >= SILENT_S and silent >= SILENT_STEPS * usual)):
        start.add("hang", rest)
        return
    start.add(inside, silent)
    start.add("end", rest - silent)


def rows(
    all_allocations: Sequence[Allocation], all_processes: Sequence[Process], *, nodes_used: int, hang_s: float
) -> dict[str, Any]:
    """Return the document truth.json. hang_s: silence after which the launcher reports a hang."""
    starts: list[tuple[Start, Allocation]] = []
    total: dict[str, float] = {}
    for allocation in all_allocations:
        groups = _starts_of(allocation, all_processes)
        if not groups:
            starts.append((Start(allocation.start, allocation.end, {"start": allocation.elapsed}), allocation))
        begin = allocation.start
        for number, group in enumerate(groups):
            end = allocation.end
            if number + 1 < len(groups):
                following = min(each.started for each in groups[number + 1])
                end = min(following, max(each.last for each in group))
            start = Start(begin, end)
            zero, cursor = _start_rows(start, group)
            if zero is None:
                start.add("end", end - cursor)
            else:
                cursor, inside = _training_rows(start, zero, cursor)
                _end_rows(start, zero, group, cursor, inside, hang_s)
            starts.append((start, allocation))
            begin = end
    last_kept = float("inf")
    for start, allocation in reversed(starts):
        for step in start.steps:
            start.add("steps_kept" if step.number <= last_kept else "steps_repeated", step.seconds)
        if start.steps:
            last_kept = min(last_kept, start.steps[0].number - 1)
        share = min(1.0, nodes_used / allocation.nodes)
        for row, seconds in start.rows.items():
            total[row] = total.get(row, 0.0) + seconds * share
        total["idle_spares"] = total.get("idle_spares", 0.0) + (start.end - start.begin) * (1 - share)
    queue, previous = 0.0, 0.0
    for each in all_allocations:
        queue += max(0.0, each.start - max(each.submit, previous))
        previous = each.end
    return {
        "charged_s": sum(each.elapsed for each in all_allocations),
        "rows": total,
        "queue_s": queue,
        "allocations": [vars(each) for each in all_allocations],
        "starts": [{"begin": start.begin, "end": start.end, "rows": start.rows} for start, _ in starts],
    }
