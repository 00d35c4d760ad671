"""Divides an allocation into steps, saves, evaluations and so on, from its logs and checkpoint files.

A program may print only every 50th step, and seldom how long a save or an evaluation took. If two printed steps with a
save or an evaluation between them are further apart than usual, the additional time counts as the save or evaluation.

The result contains bounds for everything that the log does not show.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hpcinit.report import ledger
from hpcinit.report.ledger import Segment, Start, Time, exact
from hpcinit.report.log_events import Event

EXCESS = 0.35  # an interval that is longer than usual by this share of a step contains something else
SLACK = 0.15  # this share of an excess is uncertain
HANG_S, HANG_STEPS = 60.0, 10  # a failed attempt had a hang if its last step was longer before its end
UNEVEN = 0.1  # by what share the duration of a few steps may differ from the usual one
KILL_S = 30.0  # longest time from the signal to the end of the allocation, if the log does not show it
STARTING = (ledger.START, ledger.IMPORTS, ledger.INIT, ledger.FIRST)
KINDS = {"save": ledger.SAVE, "eval": ledger.PHASES}


@dataclass(frozen=True)
class Piece:
    """One start of the ranks, from `begin` to `end`. The events are sorted by time.

    saves: when each checkpoint was complete, and its step.
    completed: whether Slurm reports success.
    before: the last step of earlier starts, or -1 for the first start.
    known_steps: the steps of all checkpoints of the run.
    loose: whether the times of the first and the last step are guesses.
    paced: whether the log or the checkpoints show how long a step takes.
    """

    begin: float
    end: float
    events: Sequence[Event]
    saves: Sequence[tuple[float, int]] = ()
    completed: bool = False
    before: int = -1
    known_steps: Sequence[int] = field(default=())
    loose: bool = False
    paced: bool = True

    @cached_property
    def logged(self) -> bool:
        """Return whether a log shows steps of this start. If not, only checkpoints show them."""
        return any(one.kind == "step" for one in self.events)

    @property
    def around(self) -> tuple[str, ...]:
        """Return the rows that may be part of the time before the first step or after the last one."""
        return () if self.paced and not self.loose and self.logged else self.possible

    @property
    def possible(self) -> tuple[str, ...]:
        return tuple(row for row in ledger.ANY if not self.completed or row not in (ledger.REPEATED, ledger.HANG))

    @property
    def hidden(self) -> tuple[str, ...]:
        """Return the rows of saves and evaluations, if they may have happened without a line in the log."""
        shown = {one.kind for one in self.events}
        return tuple(row for kind, row in KINDS.items() if kind not in shown)

    @cached_property
    def limits(self) -> dict[int, Time]:
        """Return the time of each printed step, with the earliest and the latest possible time."""
        return {
            one.step: Time(one.time, one.time - one.early_s, one.time + one.late_s)
            for one in reversed(self.events)
            if one.kind == "step" and one.time is not None
        }

    @cached_property
    def estimated(self) -> bool:
        """Return whether the times of the steps are estimates, because the log shows no clock."""
        return self.loose or any(one.early_s for one in self.events)

    def when(self, step: tuple[float, int]) -> Time:
        known = self.limits.get(step[1])
        return known if known and known.at == step[0] else exact(step[0])

    @cached_property
    def measured(self) -> list[tuple[float, float, str]]:
        """Return (start, end, row) of each save and each evaluation whose duration the log shows."""
        found = [
            (one.time - one.took_s, one.time, KINDS[one.kind])
            if one.timed
            else (one.time, one.time + one.took_s, KINDS[one.kind])
            for one in self.events
            if one.took_s and one.time is not None and one.kind in KINDS
        ]
        for kind, row in KINDS.items():
            began: float | None = None
            for one in self.events:
                if one.kind == "step":
                    began = None
                elif one.kind == kind and one.timed and one.time is not None:
                    if began is not None and one.done == (kind == "save"):
                        found.append((began, one.time, row))
                    began = one.time if not one.done else None
        united: list[tuple[float, float, str]] = []
        for begin, end, row in sorted(found):
            if united and begin < united[-1][1] and row == united[-1][2]:
                united[-1] = (united[-1][0], max(end, united[-1][1]), row)
            elif end > begin:
                united.append((begin, end, row))
        return united


def divide(piece: Piece) -> Start:
    """Divide a piece into segments, and return them as a Start."""
    steps = _with_checkpoints(piece, _steps(piece.events))
    if len(steps) < 2:
        return _without_steps(piece)
    _, every = _usual(piece, steps)
    loaded = max([one.step for one in piece.events if one.kind == "load"], default=-1)
    while len(steps) > 2 and (steps[1][1] - steps[0][1] > 10 * every or steps[0][1] < loaded < steps[1][1]):
        steps = steps[1:]  # the first number is not a training step
    usual, every = _usual(piece, steps)
    resumed, within = _resumed(piece, steps[0], every)
    segments = [*_start_up(piece, steps[0], usual, resumed, within)]
    segments += _stepping(piece, steps, usual)
    segments += _tail(piece, steps, usual, every)
    return Start(
        tuple(ledger.merged(_in_order(segments, piece.end))),
        resumed=resumed,
        resumed_within=within,
        stopped=piece.completed,
    )


def _in_order(segments: Sequence[Segment], end: float) -> Iterator[Segment]:
    """Yield the segments with corrected times: each starts where the previous one ends, and none ends after `end`."""
    now: Time | None = None
    for one in segments:
        begin = one.begin if now is None else now
        at = min(max(one.end.at, begin.at), end)
        now = Time(at, min(one.end.low, at), max(one.end.high, at))
        maybe = tuple(row for row in dict.fromkeys(one.maybe) if row != one.row)
        yield Segment(one.row, begin, now, one.first, one.last, one.count, maybe)  # faster than replace()


def _steps(events: Sequence[Event]) -> list[tuple[float, int]]:
    """Return (time, step) of the printed steps. Omit a step if its number does not increase or its time goes back."""
    found: list[tuple[float, int]] = []
    for one in events:
        if one.kind == "step" and one.time is not None:
            if found and (one.step <= found[-1][1] or one.time < found[-1][0]):
                continue
            found.append((one.time, one.step))
    return found


def _with_checkpoints(piece: Piece, steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the printed steps, plus the steps of later checkpoints.

    The last steps may be missing in the log, because a killed program loses lines that it buffered.
    """
    last = steps[-1] if steps else (piece.begin, -1)
    more = sorted((at, step) for at, step in piece.saves if at > last[0] and step > last[1])
    return [*steps, *(one for one, before in zip(more, [last, *more], strict=False) if one[1] > before[1])]


def _usual(piece: Piece, steps: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return how many seconds a step usually takes, and how many steps are usually between two printed steps.

    steps: (time, step) of each printed step.
    """
    pairs = [*itertools.pairwise(steps)]
    numbers = [b[1] - a[1] for a, b in pairs]
    every = Counter(numbers).most_common(1)[0][0]
    if 2 * numbers.count(every) < len(numbers) or numbers.count(every) < 2:
        every = sorted(numbers)[len(numbers) // 2]
    printed = sorted(one.each_s for one in piece.events if one.kind == "step" and one.each_s)
    if len(printed) > 2:
        return max(1e-6, statistics.median_low(printed)), every
    marks = _marks(piece)
    paces = [(b[0] - a[0] - sum(_inside(piece, a[0], b[0]).values())) / (b[1] - a[1]) for a, b in pairs]
    clean = [
        pace for pace, (a, b) in zip(paces, pairs, strict=True) if b[1] - a[1] == every and not _between(marks, a, b)
    ]
    return max(1e-6, statistics.median_low(clean) if len(clean) > 1 else sorted(paces)[len(paces) // 4]), every


def _inside(piece: Piece, begin: float, end: float) -> dict[str, float]:
    """Return the seconds of saves and evaluations between `begin` and `end`, by row, as far as the log shows them."""
    found: dict[str, float] = {}
    room = end - begin
    first = bisect.bisect_left(piece.measured, begin, key=lambda one: one[1])
    for one in itertools.takewhile(lambda one: one[0] < end, piece.measured[first:]):
        took = min(room, min(end, one[1]) - max(begin, one[0]))
        if took > 0:
            found[one[2]] = found.get(one[2], 0.0) + took
            room -= took
    return found


def _resumed(piece: Piece, first: tuple[float, int], every: int) -> tuple[int, int]:
    """Return the step from which the ranks continued, and the maximum error of this number.

    first: the time and number of the first printed step.
    every: how many steps are usually between two printed steps.
    """
    at, number = first
    loads = [
        one.step for one in piece.events if one.kind == "load" and 0 <= one.step <= number and (one.time or at) <= at
    ]
    if loads:
        return loads[-1], 0
    if number <= every or (piece.before < 0 and number <= max(every, 1)):
        return 0, 0
    known = [step for step in piece.known_steps if number - every <= step < number]
    if known:
        return max(known), 0
    return max(0, number - every), every - 1


def _first_line(piece: Piece) -> float:
    times = [one.time for one in piece.events if one.time is not None and one.kind != "ended"]
    return min([*times, piece.end]) if times else piece.begin


def _start_up(piece: Piece, first: tuple[float, int], usual: float, resumed: int, within: int) -> Iterator[Segment]:
    """Yield the segments up to the first printed step: the start-up, and the steps until then."""
    begin = piece.begin
    number = max(1, first[1] - resumed)
    inside = _inside(piece, first[0] - number * usual, first[0])
    at = max(begin, first[0] - number * usual - sum(inside.values()))
    line = min(max(begin, _first_line(piece)), at)
    known = piece.when(first)
    uneven = UNEVEN * number * usual
    earliest = max(begin, at - (known.at - known.low) - uneven)
    stepping = Time(at, earliest, min(known.high, at + (known.high - known.at) + uneven + within * usual))
    more = (*piece.around, *((ledger.RESTORE,) if resumed > 0 else ()))
    # If the first step was earlier than estimated, the time after it contains more saves or evaluations.
    if known.low < known.at - usual or any(begin <= mark[0] < first[0] for mark in _marks(piece)):
        more += (ledger.SAVE, ledger.PHASES)
    if number > 1:  # an evaluation, for example, may follow a step that the log does not show
        more += piece.hidden
    now = exact(begin)
    begins = {
        min(at, one.time): Time(min(at, one.time), one.time - one.early_s, one.time + one.late_s)
        for one in piece.events
        if one.kind == "stepping" and one.time is not None and begin <= one.time < first[0]
    }
    blind = (ledger.FIRST, *more) if line == at else more if line in begins else piece.around
    until = stepping if line == at else begins.get(line, exact(line))
    yield Segment(ledger.START, now, until, maybe=(ledger.IMPORTS, ledger.INIT, *blind))
    now = exact(line)
    more += (ledger.START, ledger.IMPORTS)  # a launcher may have printed the line before it started the program
    loads = [one for one in piece.events if one.kind == "load" and one.timed and line <= (one.time or 0.0) <= first[0]]
    if loads and resumed > 0:
        loading, loaded = (min(at, pick(one.time or 0.0 for one in loads)) for pick in (min, max))
        if loaded > loading:
            yield Segment(ledger.INIT, now, exact(loading), maybe=tuple(row for row in more if row != ledger.RESTORE))
            yield Segment(ledger.RESTORE, exact(loading), exact(loaded))
            now = exact(loaded)
        else:
            yield Segment(ledger.INIT, now, exact(loading), maybe=more)
            now = exact(loading)
    elif resumed > 0:
        cut = exact(max(now.at, at - 0.3 * (at - now.at)))
        yield Segment(ledger.INIT, now, cut, maybe=(ledger.FIRST, *more))
        yield Segment(ledger.RESTORE, cut, exact(at), maybe=(ledger.INIT, ledger.FIRST, *more))
        now = exact(at)
    if begins and max(begins) >= now.at:
        begun = begins[max(begins)]
        yield Segment(ledger.INIT, now, begun, maybe=more)
        yield Segment(ledger.FIRST, begun, stepping)
    else:
        yield Segment(ledger.INIT, now, stepping, maybe=(ledger.FIRST, *more))
    stepped = known.later(-sum(inside.values()))
    yield Segment(ledger.KEPT, stepping, stepped, resumed, first[1], number, piece.around)
    yield from _overheads(stepped, inside, first[1])


def _overheads(begin: Time, inside: dict[str, float], step: int) -> Iterator[Segment]:
    for row, seconds in inside.items():
        end = begin.later(seconds)
        yield Segment(row, begin, end, step, step, int(row == ledger.SAVE))
        begin = end


def _stepping(piece: Piece, steps: Sequence[tuple[float, int]], usual: float) -> Iterator[Segment]:
    """Yield the segments between the first and the last printed step."""
    marks = _marks(piece)
    ends_of_saves = {*piece.saves}
    hidden = piece.hidden
    pairs = list(itertools.pairwise(steps))
    inside = [_inside(piece, a[0], b[0]) for a, b in pairs]
    excesses = [
        b[0] - a[0] - sum(own.values()) - usual * (b[1] - a[1]) for own, (a, b) in zip(inside, pairs, strict=True)
    ]
    noise = statistics.median(map(abs, excesses))
    # Without a log, each step includes its share of the saves and evaluations between two checkpoints.
    open_rows = piece.possible if not piece.paced else () if piece.logged else tuple(KINDS.values())
    resolution = statistics.median(piece.when(step).high - step[0] for step in steps)
    resolution = min(1.0, resolution)  # a larger error is common to all steps
    for (a, b), own, excess in zip(pairs, inside, excesses, strict=True):
        (begin, first), (end, last) = a, b
        number = last - first
        until = end - sum(own.values())
        stop = exact(until) if b is not pairs[-1][1] else piece.when(b).later(-sum(own.values()))
        if excess < max(EXCESS * usual, 3 * min(noise, usual), 0.02 * number * usual):
            yield Segment(ledger.KEPT, exact(begin), stop, first, last, number, open_rows)
        else:
            saved = [ledger.SAVE] if b in ends_of_saves else []  # b is the end of a save, not a printed step
            rows = sorted({*saved, *_between(marks, a, b)}, key=lambda row: row in own)
            found = [*rows, *(row for row in hidden if row not in rows)]
            slack = SLACK * excess + min(noise, usual) + resolution
            cut = Time(until - excess, max(begin, until - excess - slack), min(until, until - excess + slack))
            row = rows[0] if rows and rows[0] not in own else ledger.KEPT
            any_of = (ledger.KEPT, *KINDS.values()) if row == ledger.KEPT or piece.estimated else ()
            maybe = (*found, *any_of, *open_rows)
            yield Segment(ledger.KEPT, exact(begin), cut, first, last, number, open_rows)
            yield Segment(row, cut, stop, last, last, int(row == ledger.SAVE), maybe)
        yield from _overheads(stop, own, last)


def _marks(piece: Piece) -> list[tuple[float, str]]:
    """Return (time, row) for each line about a save or an evaluation, and for each checkpoint file."""
    lines = [(one.time, KINDS[one.kind]) for one in piece.events if one.kind in KINDS and one.time is not None]
    return sorted([*lines, *((at, ledger.SAVE) for at, _ in piece.saves)])


def _between(marks: Sequence[tuple[float, str]], a: tuple[float, int], b: tuple[float, int]) -> list[str]:
    """Return the rows of those `marks` (see _marks()) that are between two printed steps."""
    first, after = bisect.bisect_left(marks, (a[0], "")), bisect.bisect_left(marks, (b[0], ""))
    return [row for _, row in marks[first:after]]


def _tail(piece: Piece, steps: Sequence[tuple[float, int]], usual: float, every: int) -> Iterator[Segment]:
    """Yield the segments after the last printed step."""
    at, last = steps[-1]
    end = piece.end
    total = max((one.total for one in piece.events if one.kind == "step"), default=0)
    left = max(0, total - last) if total else every
    measured = set[str]()
    for begin, until, row in piece.measured:
        if at <= begin and until <= end:
            number = min(left, round((begin - at) / usual))
            yield Segment(ledger.KEPT, exact(at), exact(begin), last, last + number, 0, piece.around)
            yield Segment(row, exact(begin), exact(until), last + number, last + number, int(row == ledger.SAVE))
            at, last, left = until, last + number, left - number
            measured.add(row)
    after = [one for one in piece.events if one.timed and one.time is not None and one.time >= at]
    saved = max([at, *(time for time, _ in piece.saves if time <= end)])
    seen = max([saved, *(min(end, one.time or 0.0) for one in after if one.kind in KINDS)])
    # A line without a time has the time of the last step. Of two such lines, only one may show its duration.
    marked = {row for time, row in _marks(piece) if time >= steps[-1][0]}
    hidden = tuple(row for row in KINDS.values() if row in marked or row in piece.hidden)
    unsure = (*hidden, *piece.around)
    steps_more: tuple[str, ...] = (ledger.KEPT,) if left else ()
    row = ledger.PHASES if ledger.PHASES in marked else ledger.KEPT
    if saved > at and not (row == ledger.PHASES and ledger.SAVE in measured):
        row = ledger.SAVE
    if piece.completed:
        seen = max([seen, *(min(end, one.time or 0.0) for one in after if one.kind == "line")])
        yield Segment(row, exact(at), exact(seen), last, last, 1, (*steps_more, *unsure, ledger.END))
        here = (*hidden, *steps_more) if seen == at or hidden else ()
        yield Segment(ledger.END, exact(seen), exact(end), maybe=(*here, *piece.around))
        return
    steps_more += (ledger.REPEATED,)  # the last step was interrupted
    if not any(one.kind == "save" and not one.done for one in piece.events):
        unsure += (ledger.SAVE,)  # the program prints no line when a save starts, so it may have been interrupted
    if seen > at:
        yield Segment(row, exact(at), exact(seen), last, last, 1, (*steps_more, *unsure))
        at = seen
    most = min(end - at, max(1, min(left, every)) * usual)  # the duration of steps that were not printed
    hangs = [one.time or 0.0 for one in after if one.kind == "hang"]
    if hangs or end - at - most > max(HANG_S, HANG_STEPS * usual):
        ran = Time(at + most / 2, at, at + most)
        yield Segment(ledger.KEPT, exact(at), ran, last, last + every, 0, piece.around)
        stop_at = max(hangs) if hangs else end
        stop = Time(stop_at, max(at, stop_at - 5), min(end, stop_at + KILL_S))
        others = piece.around if hangs else (ledger.END, *unsure)
        long_step = (ledger.REPEATED,) if piece.estimated else ()  # the last step may have ended later
        yield Segment(ledger.HANG, ran, stop, maybe=(*long_step, *others))
        yield Segment(ledger.END, stop, exact(end), maybe=(ledger.HANG, *piece.around))
        return
    # Later lines do not show that training continued, because a launcher prints lines about the end. So the time after
    # the last step or save belongs to a step, a hang or the end.
    signals = [min(end, one.time or 0.0) for one in after if one.kind in ("signal", "ended", "error")]
    stop = exact(max(at, min(signals) if signals else end - min(KILL_S, (end - at) / 2)))
    more = (*steps_more, *unsure, *((ledger.HANG,) if end - at > HANG_S else ()))
    number = max(1, round((stop.at - at) / usual))
    yield Segment(ledger.KEPT, exact(at), stop, last, last + number, 0, (*more, ledger.REPEATED, ledger.END))
    yield Segment(ledger.END, stop, exact(end), maybe=(*more, ledger.REPEATED, ledger.KEPT))


def _without_steps(piece: Piece) -> Start:
    """Return the Start of a piece with fewer than two known steps, from its first line and its saves."""
    begin = piece.begin
    saves = sorted(at for at, _ in piece.saves if begin < at < piece.end)
    first, last = (saves[0], saves[-1]) if saves else (begin, begin)
    line = min(max(begin, _first_line(piece)), first if saves else piece.end)
    possible = piece.possible
    numbers = [step for _, step in sorted(piece.saves)] or [-1]
    segments = [
        Segment(ledger.START, exact(begin), exact(line), maybe=possible),
        Segment(ledger.UNKNOWN, exact(line), exact(first), maybe=possible),
        Segment(ledger.KEPT, exact(first), exact(last), numbers[0], numbers[-1], maybe=(ledger.SAVE, ledger.PHASES)),
        Segment(ledger.UNKNOWN, exact(last), exact(piece.end), maybe=possible),
    ]
    return Start(tuple(_in_order(segments, piece.end)), stopped=piece.completed)
