"""Reads log lines, removes the prefixes that launchers, containers and log frameworks add, and finds each line's rank.

The rank is in a prefix ('3: ' of `srun -l`, '[rank3]:' of torch, '[default3]:' of torchrun, '[rank: 3]' of Lightning,
'[1,3]<stderr>:' of mpirun) or in the name of the file. In two prefixes, the number may not be the rank: srun's has the
agent's number if the tasks are torchrun agents, and torchrun's has the local rank. A line may have several prefixes, in
any order. Other text also counts as a prefix if it precedes several lines of a traceback or of Slurm's messages.
"""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcinit.base.text import MOST_RANKS
from hpcinit.records import job_log
from hpcinit.why import large_logs
from hpcinit.why.evidence import NO_RANK

NAMES = ("*.out", "*.err", "*.log", "*.txt", "*log.*", "log*", "*stderr*", "*stdout*")
MOST_FILES = 1024  # of one folder
MOST_BYTES = 256 << 20  # bytes of all logs together, if each is read completely
_SRUN = re.compile(r"^ *(\d{1,6}):(?: |$)")  # srun -l
_BRACKETS = re.compile(r"^\[(\d{1,6})\](?: |$)")  # mpirun -l of MPICH and Intel MPI
_PREFIXES = (  # the group of each pattern is a rank
    re.compile(r"^\[rank(\d{1,6})\]: ?"),  # torch
    re.compile(r"^\[?(?i:rank)[ =:_-]?(\d{1,6})(?:\]:?|:| \|) (?!.*(?:[Ww]atchdog|NCCL))"),  # programs
    re.compile(r"^[\[(](?:proc(?:ess)?|task|R)[ =:#]?(\d{1,6})[\])]:? "),  # JAX and its programs
    re.compile(
        r"^\[[^\]\s,]{1,80},(?:mpirank:)?(\d{1,6})(?:,[^\]\s]{1,80})?\]<std(?:out|err)>: ?"
    ),  # mpirun --tag-output
)
# Prefixes without a rank: timestamps (CRI adds the stream), and Ray's actors, which print their process ID.
_DAY = r"(?:\d{4}[-/]\d\d[-/]\d\d[T _]|(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d )"
_TIME = re.compile(
    rf"^(?:\[?{_DAY}?\d\d:\d\d:\d\d(?:[.,]\d+)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d)| \d{{4}})?\]?|\d{{10}}\.\d+)(?:[ :]|$)"
    r"(?:std(?:out|err) [FP] )?"
)
_RAY = re.compile(r"^\(((?:\w+ )?pid=\d{1,9}(?:, ip=\S+)?|\w+, ip=\S+)\) ")
_LIGHTNING = re.compile(r"^\[rank: (\d{1,6})\] ?")  # the local rank under srun
_LOCAL = re.compile(r"^\[default(\d{1,6})\]:")  # torchrun --tee
_TEE = re.compile(r"\[default\d+\]:")
_FILE = re.compile(
    r"(?:^|[^0-9a-z])(?:rank|task|proc|workerlog)[._-]?(\d{1,6})(?!\d)|^\d+[_-](\d{1,6})\.(?:out|err|log)$",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"(?i)^(?!.*(?:node|host|agent|worker|pod|attempt|step|epoch)).*[._-](\d{1,6})\.[a-z]+$")
_FOLDER = re.compile(r"attempt_\d+/(\d{1,6})/std(?:err|out)\.log$")  # torchrun --log-dir, by local rank
_TABLE = re.compile(r"\brank\s*: (\d+) \(local_rank: (\d+)\)")  # a line in torchrun's table of failures
# Any other prefix, such as a host (pdsh), a pod or a logger, before a text that normally starts a line.
_OTHER = re.compile(
    r"^(?P<prefix>\s{0,8}\S.{0,120}?)"
    r"(?:Traceback \(most recent call last\):|srun: |slurmstepd: |\[rank\d+\]: |Fatal Python error: |╭─)"
)
# _INNER: a label after another prefix. _STARTS: the start of a line without a label. _FIRST_WORD: a prefix that most
# lines of the log have.
_INNER = re.compile(r"(?:(?<!\S)\d{1,6}: |(?<!\S)\[\d{1,6}\] |\[rank\d+\]: ?|\[default\d+\]:)$")
_STARTS = re.compile(
    r"(?:\[rank\d+\]: ?)?\W*(?:(?:Exception Group )?Traceback \(most recent call last\):"
    r"|(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): )"
)
_FIRST_WORD = re.compile(
    r"(?!srun|slurm|hpcinit|\[rank|\[default|Traceback|\w*Error)\S{0,40}[A-Za-z]\S{0,40}(?:[\]:] (?:\| )?| {1,40}\| )"
)
# How programs name a rank inside a line: 'Rank 0, size 4', RankID:3, [RANK:0], world_rank=3, "rank": 3, PMI_RANK=3,
# SLURM_PROCID=3, JAX's process_index=3 and /task:3. Local ranks, ranks of nodes or stages, and ranks of other processes
# do not count.
_OTHERS = "local node machine group stage tensor pipeline expert tp pp dp ep cp mp lora low from to peer remote with by"
NAMED = re.compile(
    rf"(?i)(?<![a-z0-9_-]){''.join(f'(?<!{word} )' for word in _OTHERS.split())}"
    r"(?:(?:global|world|dist|distributed|data_parallel|mpi|pmix?|ompi_comm_world|my)[ _])?"
    r"(?:rank(?:[ _]?id)?|slurm_procid|process[ _](?:id|index|rank))[\"']?[ =:_#(\[-]{0,2}(\d{1,6})\b|/task:(\d{1,6})\b"
)
_PID = re.compile(r"(?i)\bp(?:id|roc)[=: ]{1,2}(\d{2,9})\b")
# A message of Slurm or a line of a rank that follows a progress bar in the same line
_WITHOUT_LINE_END = re.compile(r"(?<=[^\s:>])(?=(?:slurmstepd|srun): error: |\[rank\d{1,6}\]: ?\S)")
_CLOCK = re.compile(r"[\d:.,/-]*\d:\d\d[\d:.,]*")
_DAYTIME = re.compile(r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?")
CLOCK_BEFORE = 80  # characters at the start of a line that may contain the time of day
MOST_PREFIXES = 8
MOST_LINE = 16384  # characters of a line
# Keys of JSON objects: keys of texts from a log, and keys of a rank
_JSON_TEXT = re.compile(r"(?i)^(?:log|message|msg|event|text|error)$|exc|traceback|stack")
_BEFORE_JSON = re.compile(r'(?:\S{1,80}(?: {1,3}\|)? )?(?=\{")')  # possibly the name of a host or pod
_JSON_RANK = re.compile(r"(?i)^(?:world_|global_)?rank$")
# Composer prints the files of each rank after one has failed.
_SECTION = re.compile(r"^-+([BE])\w+ global rank (\d{1,6}) STD(?:OUT|ERR)-+$")
# In messages and tracebacks of launchers that start the ranks of a node
_AGENT = re.compile(r'torch/distributed/(?:elastic/|run\.py|launcher/)|bin/(?:torchrun|accelerate|deepspeed)"')


@dataclass(frozen=True)
class Log:
    """The text of one log.

    text: the content of the file.
    rank: the rank that writes this log, or None if several ranks do.
    written: when the file last changed.
    skipped: how many bytes are missing from the text.
    """

    text: str
    rank: int | None = None
    written: float = 0.0
    skipped: int = 0


class Line(NamedTuple):
    """A log line without its prefixes.

    rank: the rank that printed it, or NO_RANK if unknown.
    stream: identifies the process that printed it.
    clock: the time of day at the start of the line, or ''.
    """

    rank: int
    text: str
    stream: str
    clock: str = ""


def files(place: Path) -> list[Path]:
    """Return the log files at `place`, which is a file or a folder."""
    if place.is_file():
        return [place]
    found = {path for name in NAMES for path in place.rglob(name) if path.is_file()}
    return sorted(found)[:MOST_FILES]


def read(paths: Sequence[Path]) -> list[Log]:
    """Return the logs, oldest first. Unreadable files are skipped."""
    found = []
    numbers = _numbers([path.name for path in paths])
    for path in paths:
        try:
            with path.open("rb") as file:
                text, skipped = large_logs.read(file, min(large_logs.WHOLE, MOST_BYTES // len(paths)))
            found.append(Log(text, _rank_of(path, numbers), path.stat().st_mtime, skipped))
        except OSError:
            continue
    return sorted(found, key=lambda log: log.written)


def _rank_of(path: Path, numbers: Collection[int]) -> int | None:
    match = _FOLDER.search(str(path)) or _FILE.search(path.name) or (numbers and _NUMBERED.search(path.name))
    return int(next(group for group in match.groups() if group)) if match else None


def _numbers(names: Sequence[str]) -> set[int]:
    """Return the numbers at the ends of the names if they are the ranks 0 to N - 1, else an empty set.

    For example, return {0, 1} for run-77-0.out and run-77-1.out.
    """
    found = [match for name in names if (match := _NUMBERED.search(name))]
    numbers = {int(match[1]) for match in found}
    same = len({name[: match.start(1)] for name, match in zip(names, found, strict=False)}) == 1
    return numbers if same and len(found) == len(names) and numbers == set(range(len(names))) != {0} else set()


@dataclass(frozen=True)
class Labels:
    """Whether the numbers in prefixes are ranks.

    task: whether the number of an srun task is a rank.
    local: whether the local rank in torchrun's prefix is also the global rank.
    """

    task: bool
    local: bool


def labels(logs: Sequence[Log]) -> Labels:
    agents = any(_AGENT.search(log.text) or _TEE.search(log.text) for log in logs)
    return Labels(not agents, all(found[1] == found[2] for log in logs for found in _TABLE.finditer(log.text)))


def lines(log: Log, known: Labels) -> Iterator[Line]:
    """Yield the lines of a log, without their prefixes."""
    text = _WITHOUT_LINE_END.sub("\n", textwrap.dedent(log.text))
    every = [part for line in text.splitlines() for part in _unpacked(line[:MOST_LINE].rstrip())]
    outer = _Prefixes([_TIME.sub("", line, count=1) for line in every])
    # srun and the user's shell print without a label.
    printed = [_TIME.sub("", outer.split(_TIME.sub("", line, count=1))[1], count=1) for line in every]
    own = sum(1 for line in printed if line and not job_log.is_from_slurm(line))
    task = next((one for one in (_SRUN, _BRACKETS) if _labels(one, printed, own)), None)
    section = NO_RANK if log.rank is None else log.rank
    for line in every:
        if found := _SECTION.match(line):
            section = int(found[2]) if found[1] == "B" else NO_RANK
        yield _line(line, section, task, known, outer)


def _labels(label: re.Pattern[str], printed: Sequence[str], most: int) -> bool:
    """Return whether the lines of a log start with a label, such as the task number of `srun -l`.

    More than half of the lines must match, or one label must precede a message that normally starts a line.

    most: how many of the lines can have a label.
    """
    found = [(match, line) for line in printed if (match := label.match(line))]
    return 2 * len(found) > most or any(_STARTS.match(line, match.end()) for match, line in found)


def _line(line: str, rank: int, task: re.Pattern[str] | None, known: Labels, others: _Prefixes) -> Line:
    """Return a line without its prefixes, which may have any order.

    task: the pattern of a task's label, or None if the log has no such labels.
    """
    stream, rest, before = "", line, ""
    while rest != before:
        before, rest = rest, _TIME.sub("", rest, count=1)
        if task and (found := task.match(rest)):
            rank, stream, rest = int(found[1]) if known.task else rank, stream + found[1], rest[found.end() :]
            task = None  # a number after the label belongs to the text
        prefix, rest = others.split(rest)
        if prefix:
            rank, stream = named(prefix) if rank == NO_RANK else rank, stream + _CLOCK.sub("", prefix)
        if found := _RAY.match(rest):
            stream, rest = found[1], rest[found.end() :]
        if found := _LOCAL.match(rest):
            rank, stream, rest = int(found[1]) if known.local else rank, stream + found[0], rest[found.end() :]
        if found := next((match for prefix in _PREFIXES if (match := prefix.match(rest))), None):
            rank, rest = int(found[1]), rest[found.end() :]
        elif found := _LIGHTNING.match(rest):
            rank, rest = int(found[1]) if rank == NO_RANK else rank, rest[found.end() :]
    clock = _DAYTIME.search(line, 0, CLOCK_BEFORE)
    return Line(rank, rest, str(rank) if rank != NO_RANK else stream, clock[0].replace(",", ".") if clock else "")


def named(text: str) -> int:
    """Return the first rank that a text names, or NO_RANK."""
    found = NAMED.search(text)
    return int(found[1] or found[2]) if found else NO_RANK


def ranks_of_processes(lines: Sequence[Line]) -> dict[str, int]:
    """Return the rank of each process ID, from lines that contain both, such as 'pid 70118, using GPU 0. Rank 0'."""
    found: dict[str, set[int]] = {}
    for line in lines:
        pids = set(_PID.findall(line.text)) or set(_PID.findall(line.stream))
        if len(pids) == 1 and (rank := max(named(line.text), line.rank)) != NO_RANK:
            found.setdefault(pids.pop(), set()).add(rank)
    return {pid: ranks.pop() for pid, ranks in found.items() if len(ranks) == 1}


def process(text: str) -> str:
    """Return the process ID in a text, or ''."""
    found = _PID.search(text)
    return found[1] if found else ""


class _Prefixes:
    """Prefixes of unknown programs, found in front of tracebacks and messages of Slurm.

    A number in a prefix matches any number.
    """

    def __init__(self, every: Sequence[str]) -> None:
        shapes: dict[str, None] = {}
        used = [line for line in every if line]
        if found := _FIRST_WORD.match(used[0]) if len(used) > 2 else None:
            shape = _shape(found[0])
            if 10 * sum(1 for line in used if re.match(shape, line)) > 9 * len(used):
                shapes[shape] = None
        for before, line, after in zip(["", *every], every, [*every[1:], ""], strict=False):
            if len(shapes) < MOST_PREFIXES and (found := _OTHER.match(line)) and "─" not in found["prefix"]:
                prefix = _INNER.sub("", _SRUN.sub("", found["prefix"], count=1))
                shape = _shape(prefix)
                is_known = not prefix.strip() or any(one.fullmatch(prefix) for one in (_SRUN, _LOCAL, *_PREFIXES))
                if not is_known and (re.match(shape, before) or re.match(shape, after)):
                    shapes[shape] = None
        self.pattern = re.compile("|".join(sorted(shapes, key=len, reverse=True))) if shapes else None

    def split(self, line: str) -> tuple[str, str]:
        """Return the prefix of a line, or '', and the rest."""
        found = self.pattern.match(line) if self.pattern else None
        return (found[0], line[found.end() :]) if found else ("", line)


def _shape(prefix: str) -> str:
    """Return a pattern of the prefix in which each number matches any number."""
    return re.sub(r"\d+", r"\\d+", re.escape(prefix))


def _unpacked(line: str) -> Iterator[str]:
    """Yield the line or, if it is a JSON record of a logging library or container, the lines of the record's texts."""
    document, before = None, ""
    if found := _BEFORE_JSON.match(rest := _TIME.sub("", line, count=1)):
        before = found[0]
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(rest[found.end() :])
    fields = document if isinstance(document, dict) else {}
    texts = [text for name, text in fields.items() if isinstance(text, str) and _JSON_TEXT.search(name)]
    if fields.get("event") == "line" and isinstance(text := fields.get("data"), str):  # of milabench
        texts = [text]
    rank = next((value for name, value in fields.items() if _JSON_RANK.match(name)), None)
    label = before + (f"[rank{rank}]: " if isinstance(rank, int) and 0 <= rank < MOST_RANKS else "")
    if not texts:
        yield line
    for text in texts:
        yield from (label + one for one in text.splitlines())
