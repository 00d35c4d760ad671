"""The ledger: what the charged time of a run was, in rows that add up to it.

An allocation is what Slurm charges for: one job, or one requeue of it. Readers divide each allocation into segments,
and this module adds them up. A time that has only bounds has a range, which the rows inherit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from hpcinit.report.startup_phases import Report

QUEUE, START, IMPORTS, INIT, FIRST = "queue", "start", "imports", "init", "first_step"
KEPT, REPEATED, SAVE, RESTORE = "steps_kept", "steps_repeated", "save", "restore"
PHASES, HANG, END, IDLE, UNKNOWN = "evaluation", "hang", "end", "idle_spares", "unknown"
TITLES = {
    QUEUE: "waiting in the queue",
    START: "start: from the nodes to the first line",
    IMPORTS: "imports",
    INIT: "rendezvous, init, building the model",
    FIRST: "first step, beyond a usual step",
    KEPT: "steps kept",
    REPEATED: "steps lost or repeated",
    SAVE: "saving, while the program waits",
    RESTORE: "loading a checkpoint",
    PHASES: "evaluation and other declared phases",
    HANG: "hang",
    END: "end",
    IDLE: "idle spare nodes",
    UNKNOWN: "unknown",
}
NAMES = {KEPT: "steps", REPEATED: "repeated", FIRST: "first step", IDLE: "idle spares"}  # short, for the bar
ROWS = [row for row in TITLES if row != QUEUE]  # they add up to what was charged


class Time(NamedTuple):
    """A time, in seconds since 1970, and the bounds within which it may be."""

    at: float
    low: float
    high: float


def exact(at: float) -> Time:
    return Time(at, at, at)


class Amount(NamedTuple):
    """Seconds, and their range."""

    at: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def plus(self, other: Amount, factor: float = 1.0) -> Amount:
        return Amount(self.at + factor * other.at, self.low + factor * other.low, self.high + factor * other.high)


@dataclass(frozen=True)
class Segment:
    """A part of an allocation. first, last: of steps, the number of finished steps at its start and end, -1 if unknown.
    count: reports of steps, or saves."""

    row: str
    begin: Time
    end: Time
    first: int = -1
    last: int = -1
    count: int = 0

    @property
    def amount(self) -> Amount:
        low, high = max(0.0, self.end.low - self.begin.high), max(0.0, self.end.high - self.begin.low)
        return Amount(self.end.at - self.begin.at, low, high)


@dataclass(frozen=True)
class Start:
    """One start of the ranks inside an allocation.

    segments: one after the other, from its start to its end. used: the share of the allocation's GPUs whose nodes the
    ranks use. resumed: the step that it continued from, -1 if unknown, within resumed_within steps. stopped: the ranks
    saved and exited, or completed. fault: the node that ended it, '' if unknown. report: its start-up, None if unknown.
    open_s: by how many seconds a row may be less, and more, than its segments.
    """

    segments: tuple[Segment, ...]
    used: float = 1.0
    resumed: int = -1
    resumed_within: int = 0
    stopped: bool = False
    fault: str = ""
    report: Report | None = None
    open_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Allocation:
    """What Slurm charges for. restart: the number of requeues before. units: its GPUs, or its nodes without GPUs.

    queued_s: since its submission, or since the requeue. reason: why it ended, '' if unknown or if it completed.
    suspended_s: not charged.
    """

    job: str
    restart: int
    begin: float
    end: float
    units: float = 1.0
    gpus: int = 0
    nodes: int = 1
    queued_s: float | None = None
    state: str = ""
    reason: str = ""
    starts: tuple[Start, ...] = ()
    suspended_s: float = 0.0

    @property
    def charged_s(self) -> float:
        return self.end - self.begin - self.suspended_s

    @cached_property
    def rows(self) -> dict[str, Amount]:
        """Return the seconds of the allocation by row; they add up to charged_s."""
        found = dict.fromkeys(ROWS, Amount())
        for start in self.starts:
            for segment in start.segments:
                found[segment.row] = found[segment.row].plus(segment.amount, start.used)
                if start.used < 1:
                    found[IDLE] = found[IDLE].plus(segment.amount, 1 - start.used)
            for row, (less, more) in start.open_s.items():
                found[row] = found[row].plus(Amount(0.0, -min(less, found[row].low), more))
        rest = self.charged_s - sum(amount.at for amount in found.values())
        # The ranks were suspended in what takes most of the time, as far as known.
        row = UNKNOWN if rest >= 0 else max(ROWS, key=lambda row: found[row].at)
        return found | {row: found[row].plus(Amount(rest, rest, rest))}


@dataclass(frozen=True)
class Ledger:
    """The allocations of a run, or of several, in the order of their start.

    guessed: hpcinit did not record them, so that what is unknown may belong to any row.
    """

    name: str
    allocations: tuple[Allocation, ...]
    guessed: bool = False

    @property
    def charged_s(self) -> float:
        return sum(one.charged_s for one in self.allocations)

    @property
    def unit_s(self) -> float:
        """GPU-seconds, or node-seconds without GPUs."""
        return sum(one.charged_s * one.units for one in self.allocations)

    @property
    def unit(self) -> str:
        return "GPU-hours" if any(one.gpus for one in self.allocations) else "node-hours"

    @property
    def gpus(self) -> float:
        """The GPUs of an allocation; of allocations of several sizes, the mean over the charged time."""
        return self.unit_s / self.charged_s if self.charged_s and any(one.gpus for one in self.allocations) else 0.0

    @property
    def queued_s(self) -> float:
        return sum(one.queued_s or 0.0 for one in self.allocations)

    @cached_property
    def rows(self) -> dict[str, Amount]:
        """Return the GPU-seconds (node-seconds) of each row; they add up to unit_s."""
        found = dict.fromkeys(ROWS, Amount())
        for one in self.allocations:
            for row, amount in one.rows.items():
                found[row] = found[row].plus(amount, one.units)
        rest = Amount(0.0, 0.0, found[UNKNOWN].at if self.guessed else 0.0)
        return {row: amount if row in (UNKNOWN, IDLE) else amount.plus(rest) for row, amount in found.items()}


def with_repeats(allocations: Sequence[Allocation]) -> list[Allocation]:
    """Return the allocations with the steps that a later start repeated, or that were lost, in their own row."""
    starts = [(at, start) for at, one in enumerate(allocations) for start in one.starts]
    found = [start for _, start in starts]
    for number, start in enumerate(found):
        before = range(number)
        if start.resumed >= 0:
            for earlier in before:
                found[earlier] = _cut(found[earlier], start.resumed, start.resumed_within)
        elif number and not found[number - 1].stopped and any(one.row == KEPT for one in start.segments):
            found[number - 1] = _cut_after_save(found[number - 1])
    by_allocation: dict[int, list[Start]] = {}
    for (at, _), start in zip(starts, found, strict=True):
        by_allocation.setdefault(at, []).append(start)
    return [replace(one, starts=tuple(by_allocation.get(at, ()))) for at, one in enumerate(allocations)]


def _cut(start: Start, step: int, within: int) -> Start:
    """Return the start with its steps after `step` as repeated ones."""
    segments: list[Segment] = []
    for one in start.segments:
        if one.row != KEPT or one.last <= step:
            segments.append(one)
        elif one.first >= step:
            segments.append(replace(one, row=REPEATED))
        else:
            at = _when(one, step)
            slack = within * (one.end.at - one.begin.at) / (one.last - one.first)
            cut = Time(at, max(one.begin.low, at - slack), min(one.end.high, at + slack))
            segments.append(replace(one, end=cut, last=step))
            segments.append(replace(one, row=REPEATED, begin=cut, first=step))
    return replace(start, segments=tuple(segments))


def _when(one: Segment, step: int) -> float:
    return one.begin.at + (one.end.at - one.begin.at) * (step - one.first) / (one.last - one.first)


def _cut_after_save(start: Start) -> Start:
    """Return the start with the steps after its last save as lost ones, if it has saved and its steps have no
    numbers."""
    last = max((at for at, one in enumerate(start.segments) if one.row == SAVE), default=-1)
    if last < 0 or any(one.row == KEPT and one.last >= 0 for one in start.segments):
        return start
    return replace(
        start,
        segments=tuple(
            replace(one, row=REPEATED) if at > last and one.row == KEPT else one
            for at, one in enumerate(start.segments)
        ),
    )


def merged(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the segments, neighbors of one row as one: their common boundary adds nothing to the range of the row."""
    last: Segment | None = None
    for one in segments:
        if last is not None and (last.row, last.last) == (one.row, one.first):
            last = Segment(last.row, last.begin, one.end, last.first, one.last, last.count + one.count)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last
