"""Makes the ledger of a job that hpcinit did not submit, from sacct, its logs and the times of its checkpoint files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

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
NEAR_S = 90.0  # events so long before or after an allocation belong to it
ZONES_S = [0.0, *(sign * 900.0 * number for number in range(1, 57) for sign in (1, -1))]
COPIED = 0.6  # if this share of the checkpoints has times within a minute, they are the times of a copy
COPY_SHARE = 0.02  # of the time of all attempts


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
    """Return the events of a log, with their times corrected to Slurm's clock. Return None if it cannot be read.

    Try other time zones and the other order of day and month, and choose those that fit the allocations best.
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
    return round(inside / len(times), 1)  # a small share is lines that another process wrote later


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
    for one in found:  # logs of several nodes
        if apart and one.begin < apart[-1].end - 0.5 * (one.end - one.begin):
            apart[-1] = replace(apart[-1], begin=min(apart[-1].begin, one.begin), end=max(apart[-1].end, one.end))
        else:
            apart.append(one)
    return apart


def _pieces(
    allocations: Sequence[Allocation], streams: Sequence[Stream], saves: Sequence[Checkpoint]
) -> list[list[Piece]]:
    """Return one list for each allocation. It contains a Piece for each start of the ranks."""
    events: list[list[list[Event]]] = [[] for _ in allocations]  # of each allocation, by stream
    for stream in streams:
        for at, own in enumerate(_by_allocation(stream, allocations)):
            events[at].append(own)
    found = []
    for at, one in enumerate(allocations):
        main = max(events[at], key=lambda own: sum(event.kind == "step" for event in own), default=[])
        others = [
            event
            for own in events[at]
            if own is not main
            for event in own
            if event.kind not in ("step", "save", "eval", "load")
        ]
        every = sorted([*main, *others], key=lambda event: event.time or 0.0)
        found.append(list(_split(one, every, saves)))
    return found


def _by_allocation(stream: Stream, allocations: Sequence[Allocation]) -> Iterator[list[Event]]:
    for one in allocations:
        yield [
            event
            for event in stream.events
            if event.time is not None
            and (event.timed or stream.stamped)
            and one.begin - 5 <= event.time <= one.end + NEAR_S
        ]


def _split(one: Allocation, events: Sequence[Event], saves: Sequence[Checkpoint]) -> Iterator[Piece]:
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
        )
        at = end
