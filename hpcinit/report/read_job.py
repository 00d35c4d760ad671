"""Makes the ledger of a job that hpcinit did not submit, from sacct, its logs and the times of its checkpoint files."""

from __future__ import annotations

import bisect
import math
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import NamedTuple

from hpcinit.records import run_folder
from hpcinit.report import charges, ledger, log_events, read_logs
from hpcinit.report.ledger import Allocation, Ledger
from hpcinit.report.log_events import Event, Stream
from hpcinit.report.read_logs import Piece
from hpcinit.slurm import scontrol, slurm_client

OURS = (run_folder.SCRIPT, run_folder.SPEC, run_folder.SWEEP, run_folder.SUBMISSION)
MOST_FILES = 50_000
LOG = re.compile(r"(?i)\.(?:out|err|log|txt|o\d+|e\d+)(?:\.\d+)?(?:\.gz)?$|(?:^|[-_.])(?:log|stdout|stderr)s?$")
JOB_IN_NAME = re.compile(r"(?:\bslurm-|(?<!\d)(?=\d{3}))(\d{1,9}(?:_\d+)?)(?!\d)")
JOB_IN_TEXT = re.compile(
    r"(?:(?i:SLURM_JOB_?ID)[\"']?\s*[:=]\s*[\"']?|\*\*\* (?:JOB|STEP) |(?i:\bjob(?: ?id)?[ :=#]+)(?=\d{3}))(\d{1,9})\b"
)
CHECKPOINT = re.compile(r"(?i)(?:checkpoint|ckpt|step|iter|batch|\bba|update)[a-z]*[-_=.]*0*(\d+)")
WEIGHTS = re.compile(r"(?i)\.(?:pt|pth|ckpt|bin|safetensors|distcp|npz|tar|h5|msgpack)$")
NEAR_S = 90.0  # an event up to this long after an allocation belongs to it
ZONES_S = [0.0, *(sign * 900.0 * number for number in range(1, 57) for sign in (1, -1))]
COPIED = 0.6  # if this share of the checkpoints was written within a minute, the files are copies
COPY_SHARE = 0.02  # ... and within this share of the time of all attempts
MOST_CHOICES = 20_000
MOST_RECENT = 50  # the pace of a progress bar is the median over this many steps


class Known(NamedTuple):
    """How exact the times of a log are. See the fields of Piece (read_logs.py)."""

    loose: bool
    paced: bool


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its step, and when its first and its last file were written (`begin`, `end`)."""

    step: int
    begin: float
    end: float


def find(word: str) -> Ledger | None:
    """Return the ledger of the job whose logs are in the folder or file `word`.

    Return None if there are no logs, or if `word` is a run folder.
    """
    place = Path(word)
    if not word or not place.exists() or (place.is_dir() and any((place / name).exists() for name in OURS)):
        return None
    every = [place] if place.is_file() else list(files(place))
    logs = [path for path in every if LOG.search(path.name)]
    if not logs:
        return None
    allocations = _allocations(logs)
    return _ledger(place.name or str(place), allocations, logs, sorted({*every} - {*logs}), place)


def of_slurm(word: str) -> Ledger | None:
    """Return the ledger of the job with the id `word`, or None if `word` is not an id that Slurm knows."""
    if not re.fullmatch(r"\d+(?:_\d+)?", word):
        return None
    found = charges.of_jobs([word])
    if not found:
        return None
    logs = _logs_of(word)
    folders = {path.parent for path in logs} or {Path()}
    others = [path for folder in folders for path in files(folder) if not LOG.search(path.name)]
    return _ledger(word, found, logs, others, Path())


def files(place: Path) -> Iterator[Path]:
    """Yield the files below a folder, at most MOST_FILES of them."""
    number = 0
    for folder, below, names in os.walk(place):
        below[:] = [name for name in below if name not in (".git", ".venv", "__pycache__", "node_modules")]
        for name in names:
            number += 1
            if number > MOST_FILES:
                return
            yield Path(folder) / name


def _logs_of(job: str) -> list[Path]:
    """Return the log files of a job, as sacct and scontrol list them.

    If they list none, return the logs below the current folder whose names contain the job's id.
    """
    names: set[str] = set()
    for command in (
        ("sacct", "-X", "--noheader", "--parsable2", f"--jobs={job}", "--format=StdOut,StdErr,WorkDir,JobName"),
        ("scontrol", "--all", "show", "job", job),
    ):
        try:
            done = slurm_client.run(command)
        except slurm_client.Unreachable:
            continue
        if done.status:
            continue
        if command[0] == "scontrol":
            names |= {
                one.get(key, "") for one in scontrol.records(done.stdout, "JobId") for key in ("StdOut", "StdErr")
            }
            continue
        for row in (line.split("|") for line in done.stdout.splitlines()):
            if len(row) == 4:
                names |= {_expanded(name, job, row[2], row[3]) for name in row[:2] if name}
    found = {path for name in names if name for path in _glob(name)}
    here = {path for path in files(Path()) if LOG.search(path.name) and job.partition("_")[0] in path.name}
    return sorted(found or here)


def _expanded(name: str, job: str, folder: str, of_job: str) -> str:
    base, _, task = job.partition("_")
    for pattern, value in (("%j", base), ("%A", base), ("%J", base), ("%x", of_job), ("%a", task or "*")):
        name = name.replace(pattern, value)
    return str(Path(folder) / re.sub(r"%\d*[a-zA-Z]", "*", name))


def _glob(name: str) -> list[Path]:
    path = Path(name)
    return [one for one in path.parent.glob(path.name) if one.is_file()] if path.parent.is_dir() else []


def _allocations(logs: Sequence[Path]) -> list[Allocation]:
    """Return the allocations of the jobs whose ids are in the names of the logs, or else in their text."""
    names = {found for path in logs for found in JOB_IN_NAME.findall(path.name)}
    known = charges.of_jobs(sorted(names)) if names else []
    if known:
        return known
    inside: set[str] = set()
    for path in logs[:64]:
        text = log_events.beginning(path)
        inside.update(JOB_IN_TEXT.findall(text))
    return charges.of_jobs(sorted(inside)[:64]) if inside else []


def checkpoints(paths: Sequence[Path], place: Path, whole_s: float = 0.0) -> list[Checkpoint]:
    """Return the checkpoints among the files `paths`, in the order of their steps.

    If the times of the files show that they are copies made later, return [].
    place: the folder that was searched.
    whole_s: how many seconds all attempts took together.
    """
    times: dict[int, list[float]] = {}
    for path in paths:
        relative = path.relative_to(place) if path.is_relative_to(place) else path
        numbers = [int(match[1]) for part in relative.parts if (match := CHECKPOINT.search(part))]
        if numbers and (WEIGHTS.search(path.name) or len(relative.parts) > 1):
            try:
                times.setdefault(numbers[0], []).append(path.stat().st_mtime)
            except OSError:
                continue
    found = [Checkpoint(step, min(own), max(own)) for step, own in sorted(times.items())]
    ends = sorted(one.end for one in found)
    if len(found) > 2 and ends[int(COPIED * (len(ends) - 1))] - ends[0] < min(60, COPY_SHARE * whole_s):
        return []
    return found


def _ledger(
    name: str, allocations: Sequence[Allocation], logs: Sequence[Path], others: Sequence[Path], place: Path
) -> Ledger:
    streams = [one for path in logs if (one := _stream(path, allocations)) is not None and one.events]
    if not allocations:
        allocations = _from_logs(streams)
    saves = checkpoints(others, place, sum(one.charged_s for one in allocations))
    by_place = _pieces(allocations, streams, saves)
    found: list[Allocation] = []
    before = -1
    for allocation, pieces in zip(allocations, by_place, strict=True):
        starts: list[ledger.Start] = []
        for piece in pieces:
            starts.append(read_logs.divide(replace(piece, before=before)))
            before = max([before, *(event.step for event in piece.events if event.kind == "step")])
        found.append(replace(allocation, starts=tuple(starts)))
    return Ledger(name, tuple(ledger.with_repeats(found)))


def _stream(path: Path, allocations: Sequence[Allocation]) -> Stream | None:
    """Return the events of a log with times by Slurm's clock, or None if the file cannot be read.

    The log may use another time zone, or write the day before the month. Choose the combination with which most events
    happened during an allocation.
    """
    own = [one for one in allocations if one.job.partition("_")[0] in path.name] or list(allocations)
    near = own[0].begin if own else path.stat().st_mtime
    best: tuple[float, Stream] | None = None
    for day_first in (False, True):
        found = log_events.read(path, near, day_first)
        if found is None or not own:
            return found
        times = [one.time for one in found.events if one.time is not None and one.kind != "ended"]
        if not times:
            return found
        sample = times[:: max(1, len(times) // 400)]
        zones = [0.0] if found.zoned else ZONES_S
        score, shift = max((_fit(sample, own, zone), -abs(zone), zone) for zone in zones)[::2]
        if best is None or score > best[0] + 0.05:
            best = score, found.shifted(shift)
        if score > 0.9:
            break
    return best[1] if best else None


def _fit(times: Sequence[float], own: Sequence[Allocation], shift: float) -> float:
    inside = sum(any(one.begin - 5 <= at + shift <= one.end + 5 for one in own) for at in times)
    return round(inside / len(times), 1)  # rounded: another process may have written a few lines later


def _from_logs(streams: Sequence[Stream]) -> list[Allocation]:
    """Return the allocations as the logs show them, for jobs that Slurm's accounting does not list.

    An allocation lasts from the first to the last time in a log. Overlapping logs belong to the same allocation.
    """
    found: list[Allocation] = []
    for stream in streams:
        times = [one.time for one in stream.events if one.time is not None]
        if times:
            found.append(
                Allocation(stream.path.name, 0, min(times), max([*times, min(stream.written, max(times) + 60)]))
            )
    found.sort(key=lambda one: one.begin)
    apart: list[Allocation] = []
    for one in found:  # combine the logs of several nodes
        if apart and one.begin < apart[-1].end - 0.5 * (one.end - one.begin):
            apart[-1] = replace(apart[-1], begin=min(apart[-1].begin, one.begin), end=max(apart[-1].end, one.end))
        else:
            apart.append(one)
    return apart


def _pieces(
    allocations: Sequence[Allocation], streams: Sequence[Stream], saves: Sequence[Checkpoint]
) -> list[list[Piece]]:
    """Return one list for each allocation. It contains a Piece for each start of the ranks."""
    events: list[list[list[Event]]] = [[] for _ in allocations]  # for each allocation and each stream
    known = [Known(False, True) for _ in allocations]
    for stream in streams:
        if stream.stamped:
            for at, own in enumerate(_by_allocation(stream, allocations)):
                events[at].append(own)
        else:
            for at, own, how in _unstamped(stream, allocations, saves):
                events[at].append(own)
                known[at] = how
    found = []
    for at, one in enumerate(allocations):
        main = max(events[at], key=lambda own: sum(event.kind == "step" for event in own), default=[])
        others = [
            event
            for own in events[at]
            if own is not main
            for event in own
            if event.kind not in ("step", "stepping", "save", "eval", "load")
        ]
        every = sorted([*main, *others], key=lambda event: event.time or 0.0)
        found.append(list(_split(one, every, saves, known[at])))
    return found


def _by_allocation(stream: Stream, allocations: Sequence[Allocation]) -> Iterator[list[Event]]:
    for one in allocations:
        # The middle of the time between two allocations divides their events.
        before = max(((other.end + one.begin) / 2 for other in allocations if other.end <= one.begin), default=0.0)
        after = min(((one.end + other.begin) / 2 for other in allocations if other.begin >= one.end), default=math.inf)
        begin, end = max(one.begin - 5, before), min(one.end + NEAR_S, after)
        yield [event for event in stream.events if event.time is not None and begin <= event.time <= end]


def _split(one: Allocation, events: Sequence[Event], saves: Sequence[Checkpoint], known: Known) -> Iterator[Piece]:
    """Yield a Piece for each start of the ranks inside an allocation.

    Where the step numbers go back, the ranks were started again.
    """
    cuts: list[int] = []
    last = -1
    restart = 0
    for number, event in enumerate(events):
        if event.kind == "restart":
            restart = number
        if event.kind == "step":
            if event.step < last and (restart or last - event.step > 1) and event.time:
                begin = restart or number
                earlier = [at for at in range(cuts[-1] if cuts else 0, number) if events[at].kind == "step"]
                cuts.append(begin if begin > earlier[-1] else earlier[-1] + 1)
                restart = 0
                last = event.step
            last = max(last, event.step)
    bounds = [0, *cuts, len(events)]
    at = one.begin
    for number, (first, after) in enumerate(pairwise(bounds)):
        own = events[first:after]
        final = number == len(bounds) - 2
        end = one.end if final else min(one.end, max(at, events[after].time or at))
        yield Piece(
            at,
            end,
            [event for event in own if (event.time or at) <= end + NEAR_S],
            [(save.end, save.step) for save in saves if at <= save.end <= end],
            completed=final and one.state == "COMPLETED",
            known_steps=[save.step for save in saves],
            loose=known.loose,
            paced=known.paced,
        )
        at = end


# Logs without times


def _unstamped(
    stream: Stream, allocations: Sequence[Allocation], saves: Sequence[Checkpoint]
) -> Iterator[tuple[int, list[Event], Known]]:
    """Estimate when the events happened, for a log that shows no times.

    Yield a tuple per attempt: the index of its allocation, its events, and how exact their times are.
    """
    every = _chunks(stream.events)
    own = [at for at, one in enumerate(allocations) if one.job.partition("_")[0] in stream.path.name]
    own = [at for at in own or range(len(allocations)) if allocations[at].begin < stream.written] or [0]
    spans = [_relative(chunk) for chunk in every]
    lengths = [span[-1][0] if span else 0.0 for span in spans]
    # If the log ends with the last allocation, the last attempt ran in this allocation.
    last = own[-1:] if stream.written <= allocations[own[-1]].end + 120 else []
    before = own[: len(own) - len(last)] or own
    place = [before[at] for at in _places(lengths[: len(lengths) - len(last)], [allocations[at] for at in before])]
    for chunk, span, at in zip(every, spans, [*place, *last], strict=True):
        one = allocations[at]
        # A failed program may have been silent between its last step and Slurm's message about the end.
        is_last = chunk is every[-1] and one.begin < stream.written <= one.end + 120 and one.state == "COMPLETED"
        latest = min(stream.written, one.end) if chunk is every[-1] and one.begin < stream.written else one.end
        yield at, *_placed(chunk, span, one, saves, latest if is_last else None, latest)


def _chunks(events: Sequence[Event]) -> list[list[Event]]:
    """Divide the events by attempt.

    A new attempt starts in three cases: after Slurm's message that the job ended, when the step numbers go back, and
    when the program loads a checkpoint between two steps.
    """
    found: list[list[Event]] = [[]]
    last = -1
    loading: int | None = None  # the position of the line about a load after the last step
    for event in events:
        own = found[-1]
        if event.kind == "load" and last >= 0 and loading is None:
            loading = len(own)
        if event.kind == "step":
            if event.step < last or loading is not None:
                at = len(own) if loading is None else loading
                found[-1:] = [own[:at], own[at:]]
            last, loading = event.step, None
        found[-1].append(event)
        if event.kind == "ended":
            found.append([])
            last, loading = -1, None
    return [chunk for chunk in found if any(event.kind == "step" for event in chunk)] or [list(events)]


def _relative(chunk: Sequence[Event]) -> list[tuple[float, int]]:
    """Return (seconds since the first step, step) for each step.

    The log shows the times on a progress bar, or else as seconds per step.
    """
    steps = [event for event in chunk if event.kind == "step"]
    if not steps:
        return []
    bars = [event for event in steps if event.bar_s >= 0]
    found: list[tuple[float, int]] = []
    if len(bars) > 1:
        offset = 0.0
        for before, event in pairwise([bars[0], *bars]):
            if event.bar_s < before.bar_s:  # a bar of the next epoch
                recent = pairwise(found[-MOST_RECENT:])
                pace = statistics.median([(b[0] - a[0]) / (b[1] - a[1]) for a, b in recent] or [0.0])
                offset = max(found[-1][0], found[-1][0] + pace * (event.step - found[-1][1])) - event.bar_s
            if not found or event.step > found[-1][1]:
                found.append((offset + event.bar_s, event.step))
        return [(at - found[0][0], step) for at, step in found]
    each = [event.each_s for event in steps if event.each_s]
    usual = _mean_of_most(each)
    at, last = 0.0, steps[0].step
    for event in steps:
        if not found or event.step > found[-1][1]:
            at += (event.step - last) * usual
            found.append((at, event.step))
            last = event.step
    return found


def _mean_of_most(values: Sequence[float]) -> float:
    """Return the mean without the largest tenth of the values, or 0 if there are no values.

    The first step and steps with a save take longer than the others.
    """
    most = sorted(values)[: max(1, len(values) - len(values) // 10)]
    return statistics.fmean(most) if most else 0.0


def _places(lengths: Sequence[float], allocations: Sequence[Allocation]) -> list[int]:
    """Return the index of the allocation in which each attempt probably ran. The attempts stay in order.

    Choose the allocations with the most similar durations.

    lengths: the seconds from the first to the last step of each attempt.
    """
    if len(lengths) > len(allocations):
        return [min(at, len(allocations) - 1) for at in range(len(lengths))]
    best: tuple[float, Sequence[int]] | None = None
    for number, choice in enumerate(combinations(range(len(allocations)), len(lengths))):
        cost = sum(
            max(0.0, length - allocations[at].charged_s) * 10 + max(0.0, allocations[at].charged_s - length)
            for length, at in zip(lengths, choice, strict=True)
        )
        if best is None or cost < best[0]:
            best = cost, choice
        if number > MOST_CHOICES:
            break
    return list(best[1]) if best else []


def _placed(
    chunk: Sequence[Event],
    span: Sequence[tuple[float, int]],
    one: Allocation,
    saves: Sequence[Checkpoint],
    written: float | None,
    latest: float,
) -> tuple[list[Event], Known]:
    """Estimate when the events of an attempt happened inside its allocation `one`, and how exact these times are.

    span: (seconds since the first step, step) for each step.
    written: when the last line of the log was written, or None if unknown.
    latest: the last step ended at this time or earlier.
    """
    if not span:
        return [event for event in chunk if event.timed and event.time is not None], Known(False, True)
    bars = [event.bar_s for event in chunk if event.bar_s >= 0]
    times, known = _times(span, one, saves, written, bool(bars))
    limits = {} if known.loose or not known.paced else _limits(span, one, saves, latest, bool(bars))
    found: list[Event] = []
    if bars:
        first = times[span[0][1]]
        low, high = limits.get(span[0][1], (first, first))
        early_s, late_s = max(0.0, first - low), max(0.0, high - first)
        found.append(Event(first - bars[0], "stepping", early_s=early_s, late_s=late_s))
    now: float | None = None
    for event in chunk:
        if event.kind == "step":
            if event.step in times:
                now = times[event.step]
                low, high = limits.get(event.step, (now, now))
                found.append(event._replace(time=now, early_s=max(0.0, now - low), late_s=max(0.0, high - now)))
        elif event.timed and event.time is not None:
            found.append(event)
        elif now is not None or event.kind == "load":
            found.append(event._replace(time=one.begin if now is None else now + 0.01, timed=False))
    return found, known


def _times(
    span: Sequence[tuple[float, int]],
    one: Allocation,
    saves: Sequence[Checkpoint],
    written: float | None,
    bars: bool = False,
) -> tuple[dict[int, float], Known]:
    """Return the estimated time of each step, and how exact these times are.

    span: (seconds since the first step, step) for each step.
    one: the allocation in which the steps ran.
    written: when the last line of the log was written, or None if unknown.
    bars: whether `span` is the elapsed time of progress bars, which includes saves and evaluations.
    """
    length, first = span[-1][0], span[0][1]
    number = max(1, span[-1][1] - first)
    own = [save for save in saves if one.begin < save.end <= one.end and first - 1 <= save.step <= span[-1][1] + number]
    ends = {save.step: save.end for save in sorted(own, key=lambda save: -save.end)}  # the first save of each step
    anchors = sorted(ends.items())
    usual = length / number
    if bars and anchors:
        pace = statistics.median((b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(span)) if len(span) > 1 else usual
        offsets: list[float] = []
        for step, saved_at in anchors:  # the next step was the first after the save
            seconds, later = next((one for one in span if one[1] > step), span[-1])
            offsets.append(saved_at - seconds + pace * (later - step))
        numbers = [step for step, _ in anchors]
        # The bar of the next epoch starts after the save, so its elapsed time does not include the save. Therefore,
        # each save adds its duration to the offset. The first save's duration is unknown: assume the usual one.
        usual_s = statistics.median([b - a for a, b in pairwise(offsets)] or [0.0])
        offsets.insert(0, offsets[0] - max(0.0, usual_s))
        found = [offsets[bisect.bisect_right(numbers, step)] + seconds for seconds, step in span]
        return dict(zip((step for _, step in span), accumulate(found, max), strict=True)), Known(False, True)
    if len(anchors) > 1 and anchors[-1][0] > anchors[0][0]:
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(anchors) if b[1] >= a[1]]
        pace = statistics.median(slopes) if slopes else usual
        if pace > 0:
            # A step that was saved was printed before its file was finished.
            return {step: _between(anchors, step, usual, pace) for _, step in span}, Known(False, bool(usual))
    paced = bool(length)
    if not paced:  # the log shows only the numbers of the steps
        if written is not None and anchors and written > anchors[0][1] and span[-1][1] > anchors[0][0]:
            usual = (written - anchors[0][1]) / (span[-1][1] - anchors[0][0])
        else:
            usual = 0.85 * ((written or one.end) - one.begin) / number
        length = usual * number
        span = [(usual * (step - first), step) for _, step in span]
    if anchors:
        at = anchors[0][1] - (anchors[0][0] - first) * usual
    elif written is not None:
        at = max(one.begin, written - length)
    else:
        after = min(30.0 + usual, max(0.0, one.charged_s - length) / 2)  # assume an end soon after the last step
        at = one.end - after - length
    return {step: at + seconds for seconds, step in span}, Known(not anchors, paced)


def _limits(
    span: Sequence[tuple[float, int]], one: Allocation, saves: Sequence[Checkpoint], latest: float, bars: bool
) -> dict[int, tuple[float, float]]:
    """Return the earliest and the latest possible time of the first and the last step.

    The checkpoints limit these times:
    - A step ends after the checkpoints of earlier steps were written.
    - A step ends before its own checkpoint, or that of a later step, was written.
    - Two steps are at least as far apart as the progress bars show, minus 1 s. Without progress bars, they are at least
      80 % of the logged time apart.
    """
    sure, whole_s = (1.0, 1.0) if bars else (0.8, 0.0)
    usual = span[-1][0] / max(1, span[-1][1] - span[0][1])
    own = [save for save in saves if one.begin < save.end <= latest]
    steps = [number for _, number in span]
    found: dict[int, tuple[float, float]] = {}
    for seconds, step in (span[0], span[-1]):
        low, high = one.begin, latest
        for save in own:
            if save.step < step:
                since = span[bisect.bisect_right(steps, save.step)][0]  # the first step after the save
                low = max(low, save.end + sure * (seconds - since) - whole_s)
            else:
                until = span[bisect.bisect_right(steps, max(save.step, step)) - 1][0]
                high = min(high, save.end - sure * (until - seconds) + whole_s)
        high = min(high, latest - sure * (span[-1][0] - seconds) + whole_s)
        low = max(low, one.begin + sure * (seconds - span[0][0]) - whole_s)
        found[step] = min(low, high) - usual, max(low, high) + usual
    return found


def _between(anchors: Sequence[tuple[int, float]], step: int, usual: float, pace: float) -> float:
    """Estimate the time of a step from the times at which checkpoints were written.

    If two saves are further apart than usual, the additional time is assumed to be just before the later save.

    anchors: (step, time) of each checkpoint.
    usual: the seconds per step that the log shows, or 0 if unknown.
    pace: the seconds per step between checkpoints, including the saves.
    """
    each = min(usual, pace) or pace
    number = bisect.bisect_left(anchors, (step, 0.0))
    if number == 0:
        return anchors[0][1] - (anchors[0][0] - step) * each
    if number == len(anchors):
        return anchors[-1][1] + (step - anchors[-1][0]) * each
    (a, begin), (b, end) = anchors[number - 1 : number + 1]
    return begin + min((end - begin) / (b - a), each) * (step - a)
