"""The lines of a log without the prefixes of launchers, containers and log frameworks, and the rank that printed each.

The lines of a rank are recognized by their prefix ('3: ' of `srun -l`, '[rank3]:' of torch, '[default3]:' of torchrun,
'[rank: 3]' of Lightning, '[1,3]<stderr>:' of mpirun) or by the name of their file. A task of srun can be a torchrun
agent, and '[default1]:' is a local rank; both then name no rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcinit.records import job_log
from hpcinit.why import large_logs
from hpcinit.why.evidence import NO_RANK

NAMES = ("*.out", "*.err", "*.log", "*.txt", "log*", "*stderr*", "*stdout*")
MOST_FILES = 1024  # of one folder
MOST_BYTES = 256 << 20  # of all files that are read completely
_SRUN = re.compile(r"^ *(\d{1,6}):(?: |$)")  # srun -l
_PREFIXES = (  # the group is a rank
    re.compile(r"^\[rank(\d{1,6})\]: ?"),  # torch
    re.compile(r"^\[\d+,(\d{1,6})\]<std(?:out|err)>: ?"),  # mpirun --tag-output
)
# Without a rank: CRI's and others' timestamps, and Ray's actors, whose processes differ in their process ID.
_TIME = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]? (?:std(?:out|err) [FP] )?"
)
_RAY = re.compile(r"^\((\w+ pid=\d{1,9}(?:, ip=\S+)?)\) ")
_LIGHTNING = re.compile(r"^\[rank: (\d{1,6})\] ?")  # the local rank under srun
_LOCAL = re.compile(r"^\[default(\d{1,6})\]:")  # torchrun --tee
_TEE = re.compile(r"^(?: *\d+: ?)?\[default\d+\]:", re.MULTILINE)
_FILE = re.compile(
    r"(?:^|[^0-9a-z])(?:rank|task|proc)[_-]?(\d{1,6})(?!\d)|^\d+[_-](\d{1,6})\.(?:out|err|log)$", re.IGNORECASE
)
_FOLDER = re.compile(r"attempt_\d+/(\d{1,6})/std(?:err|out)\.log$")  # torchrun --log-dir, by local rank
_TABLE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: (\d+)\)")  # of torchrun's failures
# Any other prefix of a traceback's lines: a host of pdsh, a pod, a logger that prefixes each line.
_OTHER = re.compile(r"^(?P<prefix>\S.{0,120}?)Traceback \(most recent call last\):")
_NAMED = re.compile(r"(?i)\brank[ =:_-]{0,2}(\d{1,6})\b")
_CLOCK = re.compile(r"[\d:.,/-]*\d:\d\d[\d:.,]*")
MOST_PREFIXES = 8
# Composer prints the files of each rank after one has failed.
_SECTION = re.compile(r"^-+([BE])\w+ global rank (\d{1,6}) STD(?:OUT|ERR)-+$")
_AGENT = "torch/distributed/elastic/"  # in the agent's messages and tracebacks


@dataclass(frozen=True)
class Log:
    """text: of a file. rank: whose file it is, None if several ranks write to it. written: its modification time.
    skipped: the number of bytes that are not in the text."""

    text: str
    rank: int | None = None
    written: float = 0.0
    skipped: int = 0


class Line(NamedTuple):
    """A line without its prefixes. rank: who printed it, NO_RANK if unknown. stream: equal for lines of one process."""

    rank: int
    text: str
    stream: str


def files(place: Path) -> list[Path]:
    """Return the log files at `place`, a file or a folder."""
    if place.is_file():
        return [place]
    found = {path for name in NAMES for path in place.rglob(name) if path.is_file()}
    return sorted(found)[:MOST_FILES]


def read(paths: Sequence[Path]) -> list[Log]:
    """Return the logs, the oldest first. Skip files that cannot be read."""
    found = []
    for path in paths:
        try:
            with path.open("rb") as file:
                text, skipped = large_logs.read(file, min(large_logs.WHOLE, MOST_BYTES // len(paths)))
            found.append(Log(text, _rank_of(path), path.stat().st_mtime, skipped))
        except OSError:
            continue
    return sorted(found, key=lambda log: log.written)


def _rank_of(path: Path) -> int | None:
    match = _FOLDER.search(str(path)) or _FILE.search(path.name)
    return int(next(group for group in match.groups() if group)) if match else None


@dataclass(frozen=True)
class Labels:
    """Whether a task of srun, and a local rank of torchrun, is a rank."""

    task: bool
    local: bool


def labels(logs: Sequence[Log]) -> Labels:
    agents = any(_AGENT in log.text or _TEE.search(log.text) for log in logs)
    lines = (_SRUN.sub("", line, count=1) for log in logs for line in log.text.splitlines())
    return Labels(not agents, all(found[1] == found[2] for line in lines if (found := _TABLE.match(line))))


def lines(log: Log, known: Labels) -> Iterator[Line]:
    """Yield the lines of a log."""
    every = log.text.splitlines()
    # srun and the user's shell print without a label.
    labelled = sum(1 for line in every if _SRUN.match(line)) * 2 > sum(
        1 for line in every if line.strip() and not job_log.is_from_slurm(line)
    )
    others = _other_prefixes(every)
    section = NO_RANK if log.rank is None else log.rank
    for line in every:
        if found := _SECTION.match(line):
            section = int(found[2]) if found[1] == "B" else NO_RANK
        rank, rest, stream = section, line, ""
        if labelled and (found := _SRUN.match(rest)):
            rank, stream, rest = int(found[1]) if known.task else rank, found[1], rest[found.end() :]
        rest = _TIME.sub("", rest, count=1)
        if found := _RAY.match(rest):
            stream, rest = found[1], _TIME.sub("", rest[found.end() :], count=1)
        if found := _LOCAL.match(rest):
            rank, stream, rest = int(found[1]) if known.local else rank, found[0], rest[found.end() :]
        if found := next((match for prefix in _PREFIXES if (match := prefix.match(rest))), None):
            rank, rest = int(found[1]), rest[found.end() :]
        elif found := _LIGHTNING.match(rest):
            rank, rest = int(found[1]) if rank == NO_RANK else rank, rest[found.end() :]
        if found := next((match for prefix in others if (match := prefix.match(rest))), None):
            named = _NAMED.search(found[0])
            rank, stream = int(named[1]) if named and rank == NO_RANK else rank, _CLOCK.sub("", found[0])
            rest = rest[found.end() :]
        yield Line(rank, rest, str(rank) if rank != NO_RANK else stream)


def _other_prefixes(every: Sequence[str]) -> list[re.Pattern[str]]:
    """Return the prefixes of unknown form that lines of tracebacks have, with any number for each number in them."""
    shapes: dict[str, None] = {}
    for line, following in itertools.pairwise(every):
        if len(shapes) < MOST_PREFIXES and (found := _OTHER.match(line)) and "─" not in line:
            shape = re.sub(r"\d+", r"\\d+", re.escape(found["prefix"]))
            if re.match(shape, following):
                shapes[shape] = None
    return [re.compile(shape) for shape in shapes]
