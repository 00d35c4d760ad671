"""Divides the time of an allocation by what logs and checkpoint files show, with bounds for what they do not show.

A log shows only the steps that the program prints, perhaps every 50th, and rarely how long a save or an evaluation
took. If an interval between two printed steps took longer than usual, the excess is the time of the save or evaluation
in it.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcinit.report import ledger
from hpcinit.report.ledger import Segment, Start, Time, exact
from hpcinit.report.log_events import Event

EXCESS = 0.35  # an interval that took so much longer than usual, beside a save or an evaluation, contains it
SILENT_INTERVALS, SILENT_S = 1.7, 90.0  # a failed attempt that printed nothing for longer had a hang
KILL_S = 30.0  # from the signal to the end of the allocation, at most, as far as unknown
SLACK = 0.15  # of an excess


@dataclass(frozen=True)
class Piece:
    """One start of the ranks, from `begin` to `end`, with its events in the order of time.

    saves: (time, step) of each checkpoint: when its files were complete.
    completed: whether Slurm reports success.
    lost_node: whether Slurm ended it because a node failed.
    hung: whether a hang was reported.
    before: the last step of earlier starts, or -1 for the first start.
    slack_s: by how many seconds the times may be wrong, earlier and later.
    known_steps: the steps of all checkpoints of the run.
    """

    begin: float
    end: float
    events: Sequence[Event]
    saves: Sequence[tuple[float, int]] = ()
    completed: bool = False
    lost_node: bool = False
    hung: bool = False
    before: int = -1
    slack_s: tuple[float, float] = (0.0, 0.0)
    known_steps: Sequence[int] = field(default=())


def divide(piece: Piece, ready: float | None = None) -> Start:
    """Divide a piece into segments, and return them as a Start.

    ready: when init() returned, or None if unknown. Only the time after init() is divided.
    """
    steps = _with_checkpoints(piece, _steps(piece.events))
    begin = piece.begin if ready is None else ready
    if len(steps) < 2:
        return _without_steps(piece, begin, steps)
    _, every = _usual(steps)
    loaded = max([one.step for one in piece.events if one.kind == "load"], default=-1)
    while len(steps) > 2 and (steps[1][1] - steps[0][1] > 10 * every or steps[0][1] < loaded < steps[1][1]):
        steps = steps[1:]  # a number of something else
    usual, every = _usual(steps)
    resumed, within = _resumed(piece, steps[0][1], every)
    segments = [*_start_up(piece, begin, steps[0], usual, resumed, within, ready is not None)]
    segments += _stepping(piece, steps, usual)
    segments += _tail(piece, steps, usual, every)
    return Start(
        tuple(ledger.merged(_in_order(segments, piece.end))),
        resumed=resumed,
        resumed_within=within,
        stopped=piece.completed,
        open_s=_open(piece, steps, usual),
    )


def _in_order(segments: Sequence[Segment], end: float) -> Iterator[Segment]:
    """Yield the segments with corrected times: each starts where the previous one ends, and none ends after `end`."""
    now: Time | None = None
    for one in segments:
        begin = one.begin if now is None else now
        at = min(max(one.end.at, begin.at), end)
        now = Time(at, min(one.end.low, at), max(one.end.high, at))
        yield Segment(one.row, begin, now, one.first, one.last, one.count)  # faster than replace()


def _open(piece: Piece, steps: Sequence[tuple[float, int]], usual: float) -> dict[str, tuple[float, float]]:
    """Return, for each uncertain row, by how many seconds it may be shorter and longer than the sum of its segments.

    Rows are uncertain if the times of the steps are estimates.
    """
    early, late = piece.slack_s
    slack = early + late
    found: dict[str, tuple[float, float]] = {}
    if slack > 2 * usual:
        found = dict.fromkeys((ledger.SAVE, ledger.PHASES, ledger.END), (0.0, slack))
        if not piece.completed:
            found[ledger.HANG] = (0.0, slack)
    return found


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


def _usual(steps: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return how many seconds a step usually takes, and how many steps are usually between two printed ones.

    steps: (time, step) of each printed step.
    """
    pairs = [((b[0] - a[0]) / (b[1] - a[1]), b[1] - a[1]) for a, b in itertools.pairwise(steps)]
    every = Counter(number for _, number in pairs).most_common(1)[0][0]
    regular = sorted(pace for pace, number in pairs if number == every)
    if 2 * len(regular) < len(pairs) or len(regular) < 2:
        regular = sorted(pace for pace, _ in pairs)
        every = sorted(number for _, number in pairs)[len(pairs) // 2]
    return max(1e-6, statistics.median_low(regular)), every


def _resumed(piece: Piece, first: int, every: int) -> tuple[int, int]:
    """Return the step from which a start of the ranks continued, and by how many steps this may be wrong.

    first: the first printed step.
    every: how many steps are usually between two printed ones.
    """
    loads = [one.step for one in piece.events if one.kind == "load" and 0 <= one.step <= first]
    if loads:
        return loads[-1], 0
    if first <= every or (piece.before < 0 and first <= max(every, 1)):
        return 0, 0
    known = [step for step in piece.known_steps if first - every <= step <= first]
    if known:
        return max(known), 0
    return max(0, first - every), every - 1


def _first_line(piece: Piece) -> float:
    times = [one.time for one in piece.events if one.time is not None and one.kind != "ended"]
    return min([*times, piece.end]) if times else piece.begin


def _start_up(
    piece: Piece, begin: float, first: tuple[float, int], usual: float, resumed: int, within: int, is_ready: bool
) -> Iterator[Segment]:
    """Yield the segments before the first step, and the segment of the steps up to the first printed step."""
    early, late = piece.slack_s
    number = max(1, first[1] - resumed)
    at = max(begin, first[0] - number * usual)
    line = min(max(begin, _first_line(piece)), at)
    stepping = Time(
        at, max(begin, at - early - 0.1 * number * usual), min(first[0], at + late + (within + 0.2) * usual)
    )
    now = exact(begin)
    if not is_ready:
        here = Time(line, max(begin, line - early), min(at, line + late))
        yield Segment(ledger.START, now, here)
        now = here
    loads = [
        one for one in piece.events if one.kind == "load" and one.time is not None and line <= one.time <= first[0]
    ]
    if loads and resumed > 0:
        times = [one.time or 0.0 for one in loads]
        loading, loaded = min(times), max(times)
        done = loaded > loading or any(one.done for one in loads)
        low = exact(min(loading, at))
        until = (
            exact(min(loaded, at))
            if loaded > loading
            else Time(at if not done else min(loaded, at), min(loaded, at), at)
        )
        if loading == loaded and done:
            low = Time((line + min(loading, at)) / 2, line, min(loading, at))
        yield Segment(ledger.INIT, now, low)
        yield Segment(ledger.RESTORE, low, until)
        now = until
    elif resumed > 0:
        cut = Time(max(line, at - 0.3 * (at - line)), line, at)
        yield Segment(ledger.INIT, now, cut)
        yield Segment(ledger.RESTORE, cut, exact(at))
        now = exact(at)
    if is_ready:  # the model was built, or compiled in the first step
        middle = Time((now.at + stepping.at) / 2, now.low, stepping.high)
        yield Segment(ledger.INIT, now, middle)
        yield Segment(ledger.FIRST, middle, stepping)
    else:
        yield Segment(ledger.INIT, now, stepping)
    yield Segment(ledger.KEPT, stepping, exact(first[0]), resumed, first[1], number)


def _stepping(piece: Piece, steps: Sequence[tuple[float, int]], usual: float) -> Iterator[Segment]:
    """Yield the segments between the first and the last printed step."""
    marks = _marks(piece)
    times = [mark[0] for mark in marks]
    interval = _save_interval(piece)
    pairs = list(itertools.pairwise(steps))
    noise = statistics.median([abs(b[0] - a[0] - usual * (b[1] - a[1])) for a, b in pairs])
    for (begin, first), (end, last) in pairs:
        number = last - first
        excess = end - begin - number * usual
        usual_interval = Segment(ledger.KEPT, exact(begin), exact(end), first, last, number)
        if excess < max(EXCESS * usual, 3 * noise, 0.02 * number * usual):
            yield usual_interval
            continue
        inside = marks[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
        kinds = {kind for _, kind, _ in inside}
        if interval and first // interval != last // interval:
            kinds.add("save")
        if not kinds:
            yield usual_interval
            continue
        saving = min(excess, sum(b - a for a, b in _pairs(inside)))
        slack = SLACK * (excess - saving) + noise
        cut = Time(end - excess, max(begin, end - excess - slack), min(end, end - excess + slack))
        yield Segment(ledger.KEPT, exact(begin), cut, first, last, number)
        if kinds == {"save"}:
            yield Segment(ledger.SAVE, cut, exact(end), last, last, 1)
        elif kinds == {"eval"}:
            yield Segment(ledger.PHASES, cut, exact(end))
        else:  # which of both took how long may be open
            at = end - saving if saving else end - excess / 2
            half = exact(at) if saving else Time(at, cut.low, end)
            yield Segment(ledger.PHASES, cut, half)
            yield Segment(ledger.SAVE, half, exact(end), last, last, 1)


def _marks(piece: Piece) -> list[tuple[float, str, bool]]:
    """Return (time, 'save' or 'eval', whether it ended) for each line about a save or an evaluation.

    Each checkpoint file counts as the end of a save.
    """
    lines = [
        (one.time, one.kind, one.done) for one in piece.events if one.kind in ("save", "eval") and one.time is not None
    ]
    return sorted([*lines, *((at, "save", True) for at, _ in piece.saves)])


def _pairs(marks: Sequence[tuple[float, str, bool]]) -> Iterator[tuple[float, float]]:
    """Yield the start and the end of each save for which the log shows both.

    marks: what _marks() returned.
    """
    begin: float | None = None
    for at, kind, done in marks:
        if kind == "save" and not done:
            begin = at if begin is None else begin
        elif kind == "save" and begin is not None:
            yield begin, at
            begin = None


def _save_interval(piece: Piece) -> int:
    """Return how many steps are between two saves, or 0 if there are too few checkpoints to know."""
    known = sorted(set(piece.known_steps))
    apart = Counter(b - a for a, b in itertools.pairwise(known))
    if not apart:
        return 0
    number, times = apart.most_common(1)[0]
    return number if times >= 2 and number > 0 else 0


def _tail(piece: Piece, steps: Sequence[tuple[float, int]], usual: float, every: int) -> Iterator[Segment]:
    """Yield the segments after the last printed step."""
    at, last = steps[-1]
    early, late = piece.slack_s
    end = piece.end
    if at >= end:
        return
    now = Time(at, max(piece.begin, at - early), min(end, at + late))
    after = [one for one in piece.events if one.time is not None and one.time >= at]
    for begin, saved_at in _pairs([mark for mark in _marks(piece) if mark[0] >= at]):
        if saved_at <= end:
            steps_more = max(1, round((begin - now.at) / usual)) if begin - now.at > 0.5 * usual else 0
            yield Segment(ledger.KEPT, now, exact(begin), last, last + steps_more, 0)
            yield Segment(ledger.SAVE, exact(begin), exact(saved_at), last + steps_more, last + steps_more, 1)
            at, now, last = saved_at, exact(saved_at), last + steps_more
    after = [one for one in after if (one.time or 0.0) >= at]
    hangs = [one.time or 0.0 for one in after if one.kind == "hang"]
    signals = [one.time or 0.0 for one in after if one.kind in ("signal", "ended", "error")]
    saved = max(
        [
            0.0,
            *(time for time, _ in piece.saves if at <= time <= end),
            *(one.time or 0.0 for one in after if one.kind == "save"),
        ]
    )
    total = max((one.total for one in piece.events if one.kind == "step"), default=0)
    finished = piece.completed or (total and last >= total)
    interval = every * usual
    if finished:
        if saved > at:
            until = Time(saved, max(at, saved - 0.2 * (saved - at)), min(end, saved + 5))
            yield Segment(ledger.SAVE, now, until, last, last, 1)
            now = until
        yield Segment(ledger.END, now, exact(end))
        return
    silent = end - at > max(SILENT_S, SILENT_INTERVALS * interval)
    if hangs or piece.hung or piece.lost_node or (silent and not saved):
        ran = min(interval, (end - at) / 2)
        cut = Time(at + ran / 2, at, min(end, at + ran))
        yield Segment(ledger.KEPT, now, cut, last, last + every, 0)
        stop_at = max(hangs) if hangs else end
        stop = Time(stop_at, max(at, stop_at - 5), min(end, stop_at + KILL_S))
        yield Segment(ledger.HANG, cut, stop)
        yield Segment(ledger.END, stop, exact(end))
        return
    stop_at = min([end, *signals]) if signals else max(at, end - min(KILL_S, (end - at) / 2))
    stop_at = max(at, stop_at)
    stop = Time(
        stop_at, at if not signals else max(at, stop_at - usual), end if not signals else min(end, stop_at + usual)
    )
    more = max(1, round((stop_at - at) / usual))
    yield Segment(ledger.KEPT, now, stop, last, last + more, 0)
    if saved > stop_at:
        until = Time(saved, stop_at, min(end, saved + 5))
        yield Segment(ledger.SAVE, stop, until, last, last, 1)
        stop = until
    yield Segment(ledger.END, stop, exact(end))


def _without_steps(piece: Piece, begin: float, steps: Sequence[tuple[float, int]]) -> Start:
    """Return the Start of a piece with fewer than two known steps, from its first line and its saves."""
    line = min(max(begin, _first_line(piece)), piece.end)
    saves = sorted(at for at, _ in piece.saves if begin < at < piece.end)
    trained = [*(at for at, _ in steps), *saves]
    segments = [Segment(ledger.START, exact(begin), exact(line))]
    first, last = (min(trained), max(trained)) if len(trained) > 1 else (line, line)
    segments.append(Segment(ledger.UNKNOWN, exact(line), exact(first)))
    segments.append(Segment(ledger.KEPT, exact(first), exact(last)))
    segments.append(Segment(ledger.UNKNOWN, exact(last), exact(piece.end)))
    between = last - first  # saves and evaluations are in it
    open_s = {ledger.KEPT: (0.7 * between, 0.0), ledger.SAVE: (0.0, 0.7 * between), ledger.PHASES: (0.0, 0.5 * between)}
    return Start(tuple(segments), stopped=piece.completed, open_s=open_s)
