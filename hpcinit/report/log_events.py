"""Finds the events of a training run in a program's log: steps, saves, loads, evaluations, errors and signals.

The log may have any format. hpcinit recognizes times in the usual formats, and steps by a name or a progress bar.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

MOST_BYTES = 64 << 20  # most bytes that are read of one log
DIGITS = bytes.maketrans(b"123456789", b"000000000")
HEAD = 90  # how many characters at the start of a line may contain its time
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MONTHS = {
    name: at
    for at, name in enumerate(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1)
}
CLOCK = r"(?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?P<f>[.,]\d+)?"
TIMES = [
    re.compile(rf"(?P<Y>20\d\d)[-/](?P<m>\d\d)[-/](?P<d>\d\d)[T _,]+{CLOCK} ?(?P<z>Z|UTC|[+-]\d\d:?\d\d)?"),
    re.compile(rf"(?P<a>\d\d)[-/.](?P<b>\d\d)[-/.](?P<Y>(?:20)?\d\d)[T ,]+{CLOCK}"),
    re.compile(rf"(?P<n>[A-Z][a-z]{{2}}) +(?P<d>\d{{1,2}}),? +{CLOCK}(?: (?P<Y>20\d\d))?"),
    re.compile(rf"(?P<d>\d{{1,2}}) (?P<n>[A-Z][a-z]{{2}}) (?:(?P<Y>20\d\d) )?{CLOCK}"),
    re.compile(rf"\b[IWEF](?P<m>\d\d)(?P<d>\d\d) {CLOCK}"),
    re.compile(rf"(?<![\d:])(?P<a>\d\d)[-/.](?P<b>\d\d)[ T]{CLOCK}"),
    re.compile(r"^\W?(?P<e>1\d{9}(?:\.\d+)?)\b"),
    re.compile(rf"^(?:\W|\d+: |\[\w+\]:? ?)*{CLOCK}(?![\d:<])"),
]
STEPS = [
    re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)"),
    re.compile(r"(?i)\b(?:global[_ ]?step|num_updates|trainer/global_step)\b['\"]?\s*[:=]?\s*(\d+)"),
    re.compile(r"(?i)\[batch=(\d+)/(\d+)\]"),
    re.compile(
        r"(?i)\b(?:steps?|iter(?:ation)?s?|updates?|it)\b['\"\]]?\s*[:=#|]?\s*\[?\s*(\d+)(?:\s*(?:/|of)\s*(\d+))?(?![\d.]*(?:it/s|s/it|e-))"
    ),
    re.compile(r"\b(\d+)/(\d+) \[(?:\d+:)?\d+:\d+<"),
    re.compile(r"(?i)\b(?:batch|ba)[ =:#]*(\d+)(?:\s*/\s*(\d+))?"),
]
BAR = re.compile(r"(\d+)/(\d+) \[(?:(\d+):)?(\d+):(\d\d)<")
RATE = re.compile(r"([\d.]+)(s/it|it/s)")  # at the end of a bar: s/it for slow steps, it/s for fast steps
EPOCH = re.compile(r"(?i)\bepoch[ =:]*\[?(\d+)")
EACH = [
    (re.compile(r"(?i)(?:elapsed )?time per iteration \(ms\)\s*[:=]\s*([\d.]+)"), 1e-3),
    (re.compile(r"(?i)\btime(?:[_ ][a-z]+)*\s*[:=]?\s*([\d.]+) ?ms\b"), 1e-3),
    (re.compile(r"(?i)\bseconds\s*[:=]\s*([\d.]+)"), 1.0),
    (re.compile(r"\b([\d.]+) ?s/(?:it|step|iter|batch)\b"), 1.0),
    (re.compile(r"(?i)\b(?:step|iter)_?time(?:\(s\)|_s)?\s*[:=]\s*([\d.]+) ?s?\b"), 1.0),
]
# The patterns below need 0.1 ms per line. So they are used only for lines that contain, in lower case, one of these
# strings.
WORDS = re.compile(
    "sav|written|checkpoint-|load|restor|resum|eval|valid|val[ _]|hel|cancelled|watchdog|collective|heartbeat|sig|"
    "preempt|restart|traceback|error|begi|start"
)
THING = r"(?:checkpoints?|ckpts?|snapshot|model|state|weights|optimizer)"
SAVE = re.compile(
    rf"(?i)\bsav(?:ing|ed?|e)\b.{{0,60}}\b{THING}\b|{THING}.{{0,60}}\b(?:saved|written|save)\b|/checkpoint-\d+"
)
SAVED = re.compile(r"(?i)\b(?:saved|written|successfully|finished|done|completed?|took)\b")
LOAD = re.compile(
    rf"(?i)\b(?:load(?:ing|ed)?|restor(?:ing|ed?)|resum(?:ing|ed?))\b.{{0,80}}(?:{THING}|step|iteration|from)\b"
)
LOADED = re.compile(r"(?i)\b(?:loaded|restored|resumed|successfully|finished|done|took)\b")
LOADED_STEP = re.compile(r"(?i)(?:step|iter(?:ation)?|checkpoint|ckpt|update|batch|ba)s?[-_ =:#/]*0*(\d+)")
EVAL = re.compile(r"(?i)\b(?:eval(?:uat\w*|_\w+)?|validat\w+|val[_ ]loss|held.out)\b")
ENDS = re.compile(
    r"(?i)CANCELLED AT (\S+)(?: DUE TO (\w+(?: \w+)?))?|(?P<hang>watchdog caught|collective operation timeout|"
    r"heartbeat monitor|watchdog.{0,40}time(?:d )?out)|(?P<signal>SIGTERM|SIGUSR1|signal 15|signal 10|preempt)"
)
OTHERS = {"ended", "error", "load", "save", "eval"}  # lines about these events do not count as steps
RESTARTED = re.compile(r"(?i)restarting worker group|restart_count=[1-9]|\brestart \d+ of\b")
BEGINS = re.compile(r"(?i)\b(?:start|begin|beginn|resum)\w*\b.{0,20}\b(?:step|iter)")
TOOK = re.compile(r"(?i)(?:\bin|\btook|runtime['\"]?:?) +([\d.]+)( ?ms)?\b|save-checkpoint \.*: \([\d.]+, ([\d.]+)\)")
CAUSED = re.compile(r"Traceback \(most recent call last\)|srun: error:|OutOfMemoryError|CUDA error")


class Event(NamedTuple):
    """An event that one line of a log shows.

    time: seconds since 1970, or None if unknown.
    kind: line, stepping (the first step starts), step, save, load, eval, hang, signal, restart, ended or error.
    step: the number of the training step, or -1.
    done: whether the line reports the end of a save, a load or an evaluation.
    each_s: the seconds per step that the line shows, or 0.
    total: the number of steps of the run that the line shows, or 0.
    bar_s: the elapsed time that a progress bar shows, or -1.
    form: the index in STEPS of the pattern that found the step, or -1.
    took_s: the duration of the save or the evaluation that the line shows, or 0.
    timed: whether `time` is in this line. Otherwise it is the time of an earlier line, or an estimate.
    early_s, late_s: by how many seconds the event may have been earlier, or later, than `time`.
    """

    time: float | None
    kind: str
    step: int = -1
    done: bool = False
    each_s: float = 0.0
    total: int = 0
    bar_s: float = -1.0
    form: int = -1
    took_s: float = 0.0
    timed: bool = True
    early_s: float = 0.0
    late_s: float = 0.0


@dataclass(frozen=True)
class Stream:
    """The events of one log.

    written: when the file was last changed.
    zoned: whether the times in the log include their time zone.
    """

    path: Path
    events: tuple[Event, ...]
    written: float
    zoned: bool = False

    @property
    def stamped(self) -> bool:
        """Return whether most of the lines that report a step also show a time.

        If no line reports a step, return whether any line shows a time.
        """
        steps = [one.time is not None for one in self.events if one.kind == "step"]
        return 2 * sum(steps) > len(steps) if steps else any(one.time is not None for one in self.events)

    def shifted(self, seconds: float) -> Stream:
        moved = [
            one if one.time is None or one.kind == "ended" else one._replace(time=one.time + seconds)
            for one in self.events
        ]
        return replace(self, events=tuple(moved))


def read(path: Path, near: float, day_first: bool = False) -> Stream | None:
    """Return the events of a log, or None if the file is not text or cannot be read.

    near: approximately when the log starts. Lines without a date or year get it from this time.
    day_first: whether '03/04' means the 3rd of April.
    """
    try:
        data, written = _bytes(path, MOST_BYTES), path.stat().st_mtime
    except (OSError, EOFError):
        return None
    if b"\0" in data[:4096]:
        return None
    text = ESCAPES.sub("", data.decode(errors="replace")).replace("\r", "\n")
    stamps = _Stamps(near, day_first)
    events = [*_events(text, stamps)]
    forms = Counter(one.form for one in events if one.kind == "step")
    form = forms.most_common(1)[0][0] if forms else -1
    # A bar with another total belongs to an evaluation, or to a load before the first step.
    totals = Counter(one.total for one in events if one.form == form and one.bar_s >= 0)
    total = totals.most_common(1)[0][0] if totals else 0
    for at, one in enumerate(events):
        if one.kind == "step" and one.form != form:
            events[at] = one._replace(kind="line")
        elif one.kind == "step" and one.bar_s >= 0 and one.total != total:
            events[at] = Event(one.time, "eval", took_s=one.bar_s, timed=one.timed)
    return Stream(path, tuple(_without_torn(events)), written, stamps.zoned)


def _without_torn(events: Sequence[Event]) -> Iterator[Event]:
    """Omit a step whose number goes back although the elapsed time of its progress bar does not.

    stdout and stderr of a program may write into the same line. Then '| 43/130 [00:13<' ends as '3/130 [00:13<'.
    """
    last, last_s = -1, -1.0
    for one in events:
        if one.kind == "step" and one.bar_s >= 0:
            if one.step < last and one.bar_s >= max(1.0, last_s):
                continue
            last, last_s = one.step, one.bar_s
        elif one.kind in ("restart", "load", "ended"):
            last, last_s = -1, -1.0
        yield one


def beginning(path: Path) -> str:
    """Return the first 64 KB of a log, or '' if it cannot be read."""
    try:
        return _bytes(path, 1 << 16).decode(errors="replace")
    except (OSError, EOFError):
        return ""


def _bytes(path: Path, most: int) -> bytes:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        return file.read(most)


class _Stamps:
    """Reads the times in the lines of a log. The lines must be passed in order."""

    def __init__(self, near: float, day_first: bool) -> None:
        self._near, self._day_first = datetime.fromtimestamp(near), day_first
        self._forms = [*TIMES]
        self._last: float | None = None
        self.zoned = False
        self.resolution_s = 0.0  # of the last time: 1 if the line shows whole seconds

    def of(self, line: str) -> float | None:
        head = line[:HEAD]
        for form in self._forms:
            if found := form.search(head):
                try:
                    at = self._time(found.groupdict())
                except ValueError:
                    continue
                if form is not self._forms[0]:
                    self._forms = [form, *(one for one in self._forms if one is not form)]
                self._last = at
                part = found.groupdict()
                self.resolution_s = 0.0 if part.get("f") or "." in (part.get("e") or "") else 1.0
                return at
        return None

    def _time(self, part: dict[str, str | None]) -> float:
        if part.get("e"):
            self.zoned = True
            return float(part["e"] or 0)
        clock = [int(part[name] or 0) for name in "HMS"]
        fraction = float((part.get("f") or ".0").replace(",", "."))
        if "d" not in part and "a" not in part:
            return self._of_day(clock, fraction)
        year = int(part.get("Y") or self._near.year)
        year += 2000 if year < 100 else 0
        if "a" in part:
            one, two = int(part["a"] or 0), int(part["b"] or 0)
            month, day = (two, one) if (self._day_first and two <= 12) or one > 12 else (one, two)
        else:
            day = int(part["d"] or 0)
            month = MONTHS.get(part.get("n") or "", 0) or int(part.get("m") or 0)
        at = datetime(year, month, day, clock[0], clock[1], clock[2])
        if zone := part.get("z"):
            self.zoned = True
            hours, minutes = (0, 0) if zone in ("Z", "UTC") else (int(zone[:3]), int(zone[-2:]))
            shift = hours * 3600 + (-60 if zone.startswith("-") else 60) * minutes
            return at.replace(tzinfo=timezone.utc).timestamp() - shift + fraction
        return at.timestamp() + fraction

    def _of_day(self, clock: Sequence[int], fraction: float) -> float:
        """Return the time of a line that shows no date. If the clock goes back, use the next day."""
        day = datetime.fromtimestamp(self._last) if self._last else self._near
        at = day.replace(hour=clock[0], minute=clock[1], second=clock[2], microsecond=0).timestamp() + fraction
        if self._last is not None and at < self._last - 3600:
            at += 86400
        return at


class _Form(NamedTuple):
    """The patterns that find a training step in a line.

    number: the index of the step's pattern in STEPS.
    each: the pattern for the time per step, and the unit in seconds. None if the line shows no such time.
    """

    number: int
    each: tuple[re.Pattern[str], float] | None


class _Lines:
    """Reads the lines of a log. The lines must be passed in order.

    Most lines report steps and differ only in their digits. So the slow patterns are tried only for the first line of
    each shape. The shape is the line with every digit replaced by 0.
    """

    def __init__(self, stamps: _Stamps) -> None:
        self._stamps = stamps
        self._at: float | None = None
        self.forms: dict[bytes, _Form | None] = {}  # None: a line of this shape shows nothing

    def events(self, line: str, shape: bytes) -> list[Event]:
        own = self._stamps.of(line) if b"00:00:00" in shape or b"0000000000" in shape[:12] else None
        self._at = self._at if own is None else own
        if shape in self.forms:
            form, found = self.forms[shape], []
        else:
            found = [*_of_line(line, own, self._at)] if (marked := WORDS.search(line.lower())) else []
            other = (marked and BEGINS.search(line)) or any(one.kind in OTHERS for one in found)
            if marked and own is not None and not found and BEGINS.search(line):
                found.append(Event(own, "stepping"))
            form = _form(line) if b"0" in shape and not other else None
            if not found and (form or not marked):
                self.forms[shape] = form
        if form:
            found.append(_step(line, form, own, self._stamps.resolution_s))
        return found or ([] if own is None else [Event(own, "line")])


def _events(text: str, stamps: _Stamps) -> Iterator[Event]:
    shapes = text.encode("ascii", "replace").translate(DIGITS).split(b"\n")
    lines = _Lines(stamps)
    for line, shape in zip(text.split("\n"), shapes, strict=True):
        if line.strip():
            yield from lines.events(line, shape)


def _of_line(line: str, own: float | None, at: float | None) -> Iterator[Event]:
    """Yield the events that one line shows, except a training step.

    own: the time in this line, or None.
    at: the last known time in the log, or None.
    """
    time, timed = (at, False) if own is None else (own, True)
    if found := ENDS.search(line):
        if found[1]:
            with_date = TIMES[0].search(found[1])
            yield Event(datetime.fromisoformat(with_date[0][:19]).timestamp() if with_date else at, "ended")
            return
        yield Event(time, "hang" if found["hang"] else "signal", timed=timed)
    if RESTARTED.search(line):
        yield Event(time, "restart", timed=timed)
    if CAUSED.search(line):
        yield Event(time, "error", timed=timed)
    elif LOAD.search(line):
        yield Event(time, "load", _number_in(line), bool(LOADED.search(line)), timed=timed)
    elif SAVE.search(line):
        took_s = _took_s(line)
        yield Event(time, "save", _number_in(line), bool(took_s or SAVED.search(line)), took_s=took_s, timed=timed)
    elif EVAL.search(line):
        bar = BAR.search(line)
        yield Event(time, "eval", took_s=_elapsed(bar) if bar else _took_s(line), timed=timed)


def _took_s(line: str) -> float:
    """Return how long a save or an evaluation took, as the line shows it, or 0."""
    if not (found := TOOK.search(line)) or not _number(found[1] or found[3]):
        return 0.0
    return float(found[1] or found[3]) * (1e-3 if found[2] or found[3] else 1.0)


def _elapsed(bar: re.Match[str]) -> float:
    return 3600.0 * int(bar[3] or 0) + 60 * int(bar[4]) + int(bar[5])


def _number_in(line: str) -> int:
    """Return the step in a line about a checkpoint, or -1 if it shows none."""
    found = LOADED_STEP.search(line)
    return int(found[1]) if found else -1


def _form(line: str) -> _Form | None:
    number = next((at for at, form in enumerate(STEPS) if form.search(line)), None)
    if number is None:
        return None
    return _Form(number, next((one for one in EACH if (found := one[0].search(line)) and _number(found[1])), None))


def _step(line: str, form: _Form, at: float | None, resolution_s: float) -> Event:
    found = STEPS[form.number].search(line)
    assert found
    step = int(found[1])
    total = int(found[2] or 0) if found.re.groups > 1 else 0
    bar_s = -1.0
    if "<" in line and (bar := BAR.search(line)):
        bar_s = _elapsed(bar)
        epoch = EPOCH.search(line)
        if int(bar[1]) == step and epoch:  # the bar restarts in each epoch
            step, total = step + int(epoch[1]) * int(bar[2]), 0
    each_s = 0.0
    if bar_s >= 0 and (rate := RATE.search(line)) and _number(rate[1]) and float(rate[1]):
        each_s = float(rate[1]) if rate[2] == "s/it" else 1 / float(rate[1])
    elif form.each and (each := form.each[0].search(line)) and _number(each[1]):
        each_s = form.each[1] * float(each[1])
    late_s = 0.0 if at is None else resolution_s
    return Event(at, "step", step, each_s=each_s, total=total, bar_s=bar_s, form=form.number, late_s=late_s)


def _number(text: str) -> bool:
    return text.count(".") <= 1 and text.strip(".") != ""
