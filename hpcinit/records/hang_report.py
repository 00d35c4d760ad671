"""Who waits for whom: from the stacks that silent ranks leave, and from what their nodes see of them.

hang/JOB/rank-N.txt, one folder for each attempt, is what faulthandler writes, below a first line 'main thread 0x...'.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, TypeVar

from hpcinit.base.text import ranges
from hpcinit.records import run_folder, scratch
from hpcinit.records.error_records import ErrorRecord
from hpcinit.records.heartbeats import GONE, IN_KERNEL, MUTE, STOPPED, NodeHeartbeats, RankHeartbeat

FOLDER = "hang"
STACK = "rank-{rank}.txt"
RECORD = "report.json"  # a HangReport
REPORT = "report.txt"  # the same, for a person who opens the folder
NODE = "node.txt"  # 'node n2': the node at fault, for the batch script, which has no parser for JSON
ELSEWHERE = "elsewhere"  # state of a rank that left a stack and waits in no collective
MAIN = "main thread {ident:#018x}"  # as faulthandler writes a thread's number
DEAD_S = 60.0  # clocks of two nodes may differ by seconds, and a file may come late over NFS
HUNG = 76  # the exit status of a rank that was ended because it hung
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)')
THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
# Where torch waits for other ranks. Its decorators stand in c10d_logger.py as 'wrapper'.
COLLECTIVES = "torch/distributed/distributed_c10d.py"
BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")  # DDP and FSDP reduce gradients below it, in C++
NOT_THEIRS = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<frozen|/hpcinit/(?:runtime/|(?:cli|run|fork)\.py$)"
)


@dataclass(frozen=True)
class Place:
    """Where a main thread is. waits_in: 'all_reduce', 'backward' or ''. at: 'train.py:57 in step', '' if not known."""

    waits_in: str
    at: str


def place(text: str) -> Place:
    """From what such a file holds."""
    frames = list(_main_frames(text))
    theirs = next((frame for frame in frames if not NOT_THEIRS.search(frame["file"])), frames[-1] if frames else None)
    at = f"{PurePath(theirs['file']).name}:{theirs['line']} in {theirs['name']}" if theirs else ""
    return Place(_collective(frames), at)


def _collective(frames: Sequence[re.Match[str]]) -> str:
    """The outermost function of torch's that waits: all_gather_object and not the all_gather below it."""
    names = [frame["name"] for frame in frames if frame["file"].endswith(COLLECTIVES)]
    public = [name for name in names if not name.startswith("_") and name != "wrapper"]
    if public:
        return public[-1]
    back = (frame["file"].endswith(BACKWARD[0]) and frame["name"] == BACKWARD[1] for frame in frames)
    return "backward" if any(back) else ""


def _main_frames(text: str) -> Iterator[re.Match[str]]:
    """Frames of the main thread, the innermost first."""
    first, _, rest = text.partition("\n")
    main = first.rpartition(" ")[2]
    inside = False
    for line in rest.splitlines():
        if thread := THREAD.match(line):
            inside = thread[1] == main
        elif inside and (frame := FRAME.match(line)):
            yield frame


def places(folder: Path) -> dict[int, Place]:
    """Of every rank that has left a stack in `folder`, which is hang/JOB of a run."""
    found = {}
    with contextlib.suppress(OSError):  # of a disk: what could be read counts
        for path in folder.glob(STACK.format(rank="*")):
            number = path.stem.rpartition("-")[2]
            if number.isdigit():
                found[int(number)] = place(path.read_text(errors="replace"))
    return found


@dataclass(frozen=True)
class Waiting:
    """Ranks that wait in one collective, called at one line of the program."""

    ranks: tuple[int, ...] = ()
    collective: str = ""
    called_at: str = ""

    def __str__(self) -> str:
        return (
            f"{_ranks(self.ranks)} wait{'s' * (len(self.ranks) == 1)} in {self.collective}, called at {self.called_at}"
        )


@dataclass(frozen=True)
class SilentNode:
    """A node that wrote no heartbeat for silent_s seconds, and the ranks on it."""

    host: str = ""
    silent_s: float = 0.0
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"node {self.host} has said nothing for {self.silent_s:.0f} s: {_ranks(self.ranks)} ran there"


@dataclass(frozen=True)
class StuckRank:
    """A rank that does not wait in a collective. state: ELSEWHERE if it left a stack, whose line is `at`; else what its
    node sees of the process, as in Beat.state."""

    rank: int = -1
    host: str = ""
    pid: int = 0
    state: str = ""
    at: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank} on {self.host}"
        if self.state == ELSEWHERE:
            return f"{who} has not come to a collective: it is at {self.at or 'no Python line'}"
        return f"{who} cannot be asked: {_state(self.state, self.pid)}"


@dataclass(frozen=True)
class HangReport:
    """Which ranks hang, and which rank or node they wait for. report.json has these fields, report.txt their sentences.

    rank, host, state: of the one at fault; rank is None where a whole node is, all are empty where nobody is known to
    be. silent_s: since any rank took a step; None where none has. last_steps: (step, the ranks that told it last).
    unheard: ranks that left neither heartbeat nor stack. text: the lines of a report whose fields cannot be read.
    """

    rank: int | None = None
    host: str = ""
    state: str = ""
    silent_s: float | None = None
    last_steps: tuple[tuple[int, tuple[int, ...]], ...] = ()
    waiting: tuple[Waiting, ...] = ()
    unheard: tuple[int, ...] = ()
    silent_nodes: tuple[SilentNode, ...] = ()
    stuck: tuple[StuckRank, ...] = ()
    text: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The sentence about the one at fault, or the first one."""
        return next(map(str, (*self.silent_nodes, *self.stuck)), "") or self.lines()[0]

    def lines(self) -> tuple[str, ...]:
        """The report for a person, at least one line."""
        if self.text:
            return self.text
        found = [_silence(self.silent_s, self.last_steps), *map(str, self.waiting)]
        if self.unheard:
            found.append(f"{_ranks(self.unheard)} {'have' if len(self.unheard) > 1 else 'has'} never said anything")
        return (*found, *map(str, self.silent_nodes), *map(str, self.stuck))

    def document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.document()) + "\n"


def from_document(document: Mapping[str, Any]) -> HangReport:
    """Return the report that document() was made of. Keys that are missing count as empty, unknown ones as nothing.

    Raise ValueError, TypeError or AttributeError for values of other types.
    """
    found = run_folder.from_known_fields(HangReport, document)
    silent, stuck = _parts(SilentNode, found.silent_nodes), _parts(StuckRank, found.stuck)
    report = replace(
        found,
        last_steps=tuple((step, tuple(ranks)) for step, ranks in found.last_steps),
        waiting=_parts(Waiting, found.waiting),
        unheard=tuple(found.unheard),
        silent_nodes=silent,
        stuck=stuck,
        text=tuple(found.text),
    )
    texts = [report.host, report.state, *(one.host for one in silent), *(one.host for one in stuck), *report.text]
    if not (report.rank is None or isinstance(report.rank, int)) or not all(isinstance(one, str) for one in texts):
        raise ValueError("rank is no number, or a name is no text")
    report.lines()  # raises for what no sentence can be made of
    return report


T = TypeVar("T")


def _parts(kind: type[T], documents: Iterable[Any]) -> tuple[T, ...]:
    """Return the parts of a report, with tuples where JSON has lists."""
    values = ({k: tuple(v) if isinstance(v, list) else v for k, v in one.items()} for one in documents)
    return tuple(run_folder.from_known_fields(kind, one) for one in values)


def of_record(record: ErrorRecord | None) -> HangReport:
    """Return the report in the error record of the rank that wrote it, or its message where there is none."""
    if record is None:
        return HangReport(text=("no report",))
    try:
        return from_document(record.hang or {"text": [record.error]})
    except (ValueError, TypeError, AttributeError):
        return HangReport(text=(record.error,))


def report(
    nodes: Sequence[NodeHeartbeats], stacks: Mapping[int, Place], now_s: float, size: int, fresh_s: float = DEAD_S
) -> HangReport:
    """How long nothing has happened, who waits in what, and who has not come there.

    now_s: in seconds since 1970, against which a node that says nothing any more is told. size: of the world.
    fresh_s: how old a node's last word may be while one of its ranks runs.
    """
    beats = {beat.rank: (node.host, beat) for node in nodes for beat in node.beats}
    silent_s, last_steps = _last([beat for _, beat in beats.values()])
    together: dict[tuple[str, str], list[int]] = {}
    for rank, where in stacks.items():
        if where.waits_in:
            together.setdefault((where.waits_in, where.at), []).append(rank)
    groups = sorted(together.items(), key=lambda item: -len(item[1]))
    unheard = sorted(set(range(size)) - set(beats) - set(stacks))
    silent = []
    for node in nodes:
        # Several ranks, no stack of any, and none that the others saw in trouble: that is the node, or its disk. So a
        # clock that is off by seconds blames nobody.
        whole = len(node.beats) > 1 and not any(beat.rank in stacks or beat.state for beat in node.beats)
        if now_s - node.time > (fresh_s if whole else DEAD_S):
            ranks = tuple(beat.rank for beat in node.beats)
            silent.append(SilentNode(node.host, now_s - node.time, ranks))
            beats = {rank: found for rank, found in beats.items() if rank not in ranks}
    stuck = []
    for rank, (host, beat) in sorted(beats.items()):
        found = stacks.get(rank)
        if found is None:
            stuck.append(StuckRank(rank, host, beat.pid, beat.state))
        elif not found.waits_in:
            stuck.append(StuckRank(rank, host, beat.pid, ELSEWHERE, found.at))
    first = stuck[0] if stuck and not silent else StuckRank(host=silent[0].host if silent else "")
    return HangReport(
        rank=first.rank if first.rank >= 0 else None,
        host=first.host,
        state=first.state,
        silent_s=silent_s,
        last_steps=last_steps,
        waiting=tuple(Waiting(tuple(ranks), *where) for where, ranks in groups),
        unheard=tuple(unheard),
        silent_nodes=tuple(silent),
        stuck=tuple(stuck),
    )


def left(run: Path, job_id: str, restart: object) -> HangReport | None:
    """The report in the run folder `run`, of an attempt's steps, whose folders are JOB.STEP.RESTART; None if none is.

    restart: a number, or None where nobody says which. job_id: of a task '18_1', whose steps have another number of
    Slurm's, and whose folder no other job has.
    """
    for folder in sorted({path.parent for name in (RECORD, REPORT) for path in (run / FOLDER).glob(f"*/{name}")}):
        job, _, rest = folder.name.partition(".")
        if ("_" in job_id or job == scratch.folder_name(job_id)) and (
            restart is None or rest.rpartition(".")[2] in ("", str(restart))
        ):
            return _read(folder)
    return None


def _read(folder: Path) -> HangReport | None:
    """The record, or the text beside it where the record is torn, or of a version that wrote none."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        return from_document(json.loads((folder / RECORD).read_text()))
    with contextlib.suppress(OSError):
        if lines := tuple((folder / REPORT).read_text(errors="replace").splitlines()):
            return HangReport(text=lines)
    return None


def _last(beats: Sequence[RankHeartbeat]) -> tuple[float | None, tuple[tuple[int, tuple[int, ...]], ...]]:
    """Seconds since any rank took a step, and (step, ranks) of the steps that they told last."""
    spoken = [beat for beat in beats if beat.silent_s is not None]
    steps: dict[int, list[int]] = {}
    for beat in spoken:
        steps.setdefault(beat.step, []).append(beat.rank)
    since = min((beat.silent_s or 0.0 for beat in spoken), default=None)
    return since, tuple((step, tuple(ranks)) for step, ranks in sorted(steps.items()))


def _silence(silent_s: float | None, last_steps: Sequence[tuple[int, Sequence[int]]]) -> str:
    if silent_s is None:
        return "no rank has told a step yet"
    told = ", ".join(f"step {step} by {_ranks(ranks)}" for step, ranks in last_steps)
    return f"no step for {silent_s:.0f} s; last told: {told}"


def _state(state: str, pid: int) -> str:
    words = {
        STOPPED: f"process {pid} is stopped (SIGSTOP, or a debugger); kill -CONT {pid} lets it go on",
        IN_KERNEL: f"process {pid} waits in the kernel, for a disk or a driver",
        GONE: f"process {pid} is gone",
        MUTE: f"process {pid} runs and lets no other thread run: it is in C code that keeps Python's lock",
    }
    return words.get(state, f"process {pid} left no stack")


def _ranks(found: Sequence[int]) -> str:
    return f"rank{'s' * (len(found) > 1)} {ranges(found)}"
