"""The ledger of a run: how much of the charged time went into training, saves, start-up and so on.

The ledger has one row for each of these uses. The rows add up to the time that Slurm charged.

An allocation is one job, or one requeue of a job. Other modules divide it into segments, and each segment belongs to
one row.

If the records do not show an exact time, the ledger shows the lowest and the highest possible value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hpcinit.report.startup_phases import Report

QUEUE, START, IMPORTS, INIT, FIRST = "queue", "start", "imports", "init", "first_step"
KEPT, REPEATED, SAVE, RESTORE = "steps_kept", "steps_repeated", "save", "restore"
PHASES, HANG, END, IDLE, UNKNOWN = "evaluation", "hang", "end", "idle_spares", "unknown"
TITLES = {
    QUEUE: "waiting in the queue",
    START: "start: before the first line of output",
    IMPORTS: "imports",
    INIT: "rendezvous, init, building the model",
    FIRST: "extra time of the first step",
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
NAMES = {KEPT: "steps", REPEATED: "repeated", FIRST: "first step", IDLE: "idle spares"}  # short names for the bar
ROWS = [row for row in TITLES if row != QUEUE]  # they add up to what was charged
ANY = tuple(row for row in ROWS if row not in (IDLE, UNKNOWN))


class Time(NamedTuple):
    """A time in seconds since 1970, with the earliest and the latest possible time."""

    at: float
    low: float
    high: float

    def later(self, seconds: float) -> Time:
        """Return the time `seconds` later."""
        return Time(self.at + seconds, self.low + seconds, self.high + seconds)


def exact(at: float) -> Time:
    return Time(at, at, at)


class Amount(NamedTuple):
    """A duration in seconds, with the lowest and the highest possible value."""

    at: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def within(self, most: float) -> Amount:
        """Return the amount with `high` limited to `most`. In any case, 0 <= low <= at <= high."""
        return Amount(self.at, max(0.0, min(self.low, self.at)), max(self.at, min(self.high, most)))

    def plus(self, other: Amount, factor: float = 1.0) -> Amount:
        return Amount(self.at + factor * other.at, self.low + factor * other.low, self.high + factor * other.high)


@dataclass(frozen=True)
class Segment:
    """A part of an allocation. It belongs to one row of the ledger.

    first, last: the number of finished training steps at the start and at the end, or -1 if unknown.
    count: how many steps were reported, or how many saves were made.
    maybe: other rows to which some of this time may belong.
    """

    row: str
    begin: Time
    end: Time
    first: int = -1
    last: int = -1
    count: int = 0
    maybe: tuple[str, ...] = ()

    @property
    def amount(self) -> Amount:
        at = max(0.0, self.end.at - self.begin.at)
        low = 0.0 if self.maybe else max(0.0, self.end.low - self.begin.high)
        return Amount(at, low, self.end.high - self.begin.low).within(self.end.high - self.begin.low)


@dataclass(frozen=True)
class Start:
    """One start of the ranks inside an allocation.

    segments: its parts, in the order of time.
    used: which share of the allocation's nodes runs ranks.
    resumed: the step from which training continued, or -1 if unknown.
    resumed_within: the maximum error of `resumed`, in steps.
    stopped: whether the program completed, or saved and exited.
    fault: the node that made the ranks fail, or '' if unknown.
    report: the start-up report, or None if unknown.
    """

    segments: tuple[Segment, ...]
    used: float = 1.0
    resumed: int = -1
    resumed_within: int = 0
    stopped: bool = False
    fault: str = ""
    report: Report | None = None


@dataclass(frozen=True)
class Allocation:
    """What Slurm charges for: one job, or one requeue of it.

    restart: how often the job had been requeued before.
    units: the number of its GPUs, or of its nodes if it has no GPUs.
    queued_s: how long it was in the queue, since its submission or its requeue. None if unknown.
    reason: why it ended, or '' if that is unknown or if it completed.
    suspended_s: how long it was suspended, which is not charged.
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
        """Return the seconds of each row of this allocation. They add up to charged_s."""
        found = dict.fromkeys(ROWS, Amount())
        for start in self.starts:
            for segment in start.segments:
                found[segment.row] = found[segment.row].plus(segment.amount, start.used)
                for row in segment.maybe:
                    found[row] = found[row].plus(Amount(0.0, 0.0, segment.amount.high), start.used)
                if start.used < 1:
                    found[IDLE] = found[IDLE].plus(segment.amount, 1 - start.used)
        rest = self.charged_s - sum(amount.at for amount in found.values())
        # If the rows exceed the charged time, the ranks were suspended. Assume that this was in the largest row.
        row = UNKNOWN if rest >= 0 else max(ROWS, key=lambda row: found[row].at)
        found[row] = found[row].plus(Amount(rest, rest, rest))
        return {row: amount.within(self.charged_s) for row, amount in found.items()}


@dataclass(frozen=True)
class Ledger:
    """The allocations of one or more runs, in the order of their starts."""

    name: str
    allocations: tuple[Allocation, ...]

    @property
    def charged_s(self) -> float:
        return sum(one.charged_s for one in self.allocations)

    @property
    def unit_s(self) -> float:
        """Return the charged GPU-seconds, or the node-seconds if no GPUs were used."""
        return sum(one.charged_s * one.units for one in self.allocations)

    @property
    def unit(self) -> str:
        return "GPU-hours" if any(one.gpus for one in self.allocations) else "node-hours"

    @property
    def gpus(self) -> float:
        """Return the number of GPUs. If allocations have different numbers, return the mean over the charged time."""
        return self.unit_s / self.charged_s if self.charged_s and any(one.gpus for one in self.allocations) else 0.0

    @property
    def queued_s(self) -> float:
        return sum(one.queued_s or 0.0 for one in self.allocations)

    @cached_property
    def rows(self) -> dict[str, Amount]:
        """Return the GPU-seconds, or node-seconds, of each row. They add up to unit_s."""
        found = dict.fromkeys(ROWS, Amount())
        for one in self.allocations:
            for row, amount in one.rows.items():
                found[row] = found[row].plus(amount, one.units)
        return found


def with_repeats(allocations: Sequence[Allocation]) -> list[Allocation]:
    """Move the training steps that were lost or repeated to the row REPEATED. Return the new allocations."""
    starts = [(at, start) for at, one in enumerate(allocations) for start in one.starts]
    found = [start for _, start in starts]
    for number, start in enumerate(found):
        before = range(number)
        if start.resumed >= 0:
            for earlier in before:
                found[earlier] = _cut(found[earlier], start.resumed, start.resumed_within)
        elif number and not found[number - 1].stopped and any(_steps_in(one) for one in start.segments):
            found[number - 1] = _open_after_save(found[number - 1], any(one.row == KEPT for one in start.segments))
    by_allocation: dict[int, list[Start]] = {}
    for (at, _), start in zip(starts, found, strict=True):
        by_allocation.setdefault(at, []).append(start)
    return [replace(one, starts=tuple(by_allocation.get(at, ()))) for at, one in enumerate(allocations)]


def _cut(start: Start, step: int, within: int) -> Start:
    """Move the training steps after `step` to the row REPEATED.

    within: the maximum error of `step`.
    """
    segments: list[Segment] = []
    for part in start.segments:
        unsure = KEPT in part.maybe and (part.last > step or part.last < 0)  # some of its steps may be after `step`
        one = replace(part, maybe=_others((*part.maybe, REPEATED), part.row)) if unsure else part
        if one.row != KEPT or one.last <= step:
            segments.append(one)
        elif one.first >= step:
            segments.append(replace(one, row=REPEATED))
        else:
            at = _when(one, step)
            slack = within * (one.end.at - one.begin.at) / (one.last - one.first)
            cut = Time(at, max(one.begin.low, at - slack), min(one.end.high, at + slack))
            both = (*one.maybe, KEPT, REPEATED) if one.maybe else ()
            segments.append(replace(one, end=cut, last=step, maybe=_others(both, KEPT)))
            segments.append(replace(one, row=REPEATED, begin=cut, first=step, maybe=_others(both, REPEATED)))
    return replace(start, segments=tuple(segments))


def _others(rows: Sequence[str], row: str) -> tuple[str, ...]:
    return tuple(one for one in dict.fromkeys(rows) if one != row)


def _when(one: Segment, step: int) -> float:
    return one.begin.at + (one.end.at - one.begin.at) * (step - one.first) / (one.last - one.first)


def _steps_in(one: Segment) -> bool:
    return one.row == UNKNOWN or KEPT in (one.row, *one.maybe)


def _open_after_save(start: Start, repeated: bool) -> Start:
    """Mark the steps after the last save as possibly lost. Use this if the first step of the next start is unknown.

    A program that saves also loads its saves. So the next start continued from the last known save, or a later step.

    repeated: whether it is certain that the next start trained. If there was also a save, move the steps to REPEATED.
    """
    last = max((at for at, one in enumerate(start.segments) if one.row == SAVE), default=-1)
    segments = [*start.segments]
    for at, one in enumerate(segments):
        if at > last and KEPT in (one.row, *one.maybe):
            row = REPEATED if repeated and last >= 0 and one.row == KEPT else one.row
            segments[at] = replace(one, row=row, maybe=_others((*one.maybe, KEPT, REPEATED), row))
    return replace(start, segments=tuple(segments))


def merged(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Join neighboring segments of the same row.

    The result has narrower bounds, because an uncertain time between two joined segments no longer matters.
    """
    last: Segment | None = None
    for one in segments:
        if last is not None and (last.row, last.last, last.maybe) == (one.row, one.first, one.maybe):
            last = Segment(last.row, last.begin, one.end, last.first, one.last, last.count + one.count, one.maybe)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last
