"""The hang report: which rank the others are waiting for, according to all ranks' stacks and heartbeats.

Each attempt has a folder hang/JOB. Its file rank-N.txt contains 'main thread 0x...' on the first line, and then the
stacks that Python's faulthandler wrote.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from hpcinit.base import safe_files
from hpcinit.base.text import counted, rank_names
from hpcinit.records import run_folder, scratch, timeline
from hpcinit.records.heartbeats import GONE, IN_KERNEL, MUTE, STOPPED, NodeHeartbeats, RankHeartbeat

STACK = "rank-{rank}.txt"
# Written by rank 0. silent_s: for how long no rank has printed anything. complete: whether the ranks have had enough
# time to write their stacks.
SILENT = "silent.json"
ENDS = "ends.txt"  # exists if the rank that wrote the report has decided to end all ranks
NO_STEPS = (
    "no-steps.txt"  # exists while a rank that reports steps finishes none, so that other ranks write their stacks
)
RECORD = "report.json"  # a HangReport
REPORT = "report.txt"  # the same as text, for people
ELSEWHERE = "elsewhere"  # state of a rank whose stack shows no collective
ENDED = "ended"  # state of a rank in which hpcinit waits for other ranks, before or after the program
MAIN = "main thread {ident:#018x}"  # as faulthandler writes a thread's number
DEAD_S = 60.0  # so long, because clocks of two nodes may differ and a file may appear late over NFS
MOST_STUCK = 8  # most ranks outside of collectives that a report lists
SAME_SHARE = 0.5  # a rank that stays in one function for this share of the silence counts as stuck there
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)')
SAMPLED = re.compile(r"cpu_s ([\d.]+) of_s ([\d.]+) same_s ([\d.]+)")  # a line below MAIN, written by output_watch
NOTED = re.compile(r"on (\S+) pid (\d+)(?: loader (pid (\d+).+))?")  # a line below MAIN, written by output_watch
THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
# Where torch waits for other ranks. Its decorators are frames named 'wrapper' in c10d_logger.py.
COLLECTIVES = "torch/distributed/distributed_c10d.py"
LOADER = ("torch/utils/data/dataloader.py", "_get_data", "_try_get_data")  # where torch waits for its workers
BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")  # DDP and FSDP reduce gradients below it, in C++
INSTALLED = re.compile(r"/(?:site|dist)-packages/")
STANDARD_LIBRARY = re.compile(r"/lib(?:64)?/python3\.\d+t?/(?!(?:site|dist)-packages/)|^<frozen")
BELOW_PROGRAMS = re.compile(rf"{STANDARD_LIBRARY.pattern}|-packages/torch/")  # code that programs and hpcinit call
PACKAGE = Path(__file__).parents[1]
PROGRAMS = re.compile(r"jobs/(?!node_|function|hydra_task|replay_)")  # programs that ship with hpcinit


@dataclass(frozen=True)
class Place:
    """Where the main thread of a rank is.

    waits_in: the collective in which the thread waits, 'backward', or '' if it waits in none.
    at: the line of the program, such as 'train.py:57 in step', or '' if unknown.
    outside: True if the program has not started yet, or has ended while hpcinit waits for other ranks.
    loader: the DataLoader worker for which the thread waits, such as 'its DataLoader worker (pid 4242, ...)', or ''.
    worker: the process id of that worker, or 0 if unknown.
    host, pid: the node and the process id of the rank.
    """

    waits_in: str
    at: str
    cpu: float | None = None  # share of a core that the process used in the last seconds
    same_s: float = 0.0  # for how many seconds the main thread was seen in the same function, without a new collective
    outside: bool = False
    loader: str = ""
    worker: int = 0
    host: str = ""
    pid: int = 0


@functools.cache  # the same files are on the stacks of all ranks
def is_of_hpcinit(file: str) -> bool:
    """Return whether a file in a stack belongs to the package hpcinit, even if the rank uses another copy of hpcinit.

    Programs that ship with hpcinit, such as hpcinit/jobs/smoke.py, don't count, because they run like a user's program.
    """
    _, found, inside = file.rpartition(f"/{PACKAGE.name}/")
    return bool(found) and not PROGRAMS.match(inside) and (PACKAGE / inside).is_file()


def is_user_code(file: str) -> bool:
    """Return whether a file in a stack is the user's: not in an installed package, the standard library or hpcinit."""
    return not (INSTALLED.search(file) or STANDARD_LIBRARY.search(file) or is_of_hpcinit(file))


def place(text: str) -> Place:
    """Read a rank's stack file and return where its main thread is."""
    found, notes = _place_of(list(_main_frames(text))), text.partition("Thread")[0]
    if noted := NOTED.search(notes):
        worker = f"{found.loader} ({noted[3]})" if noted[3] and found.loader else found.loader
        found = replace(found, host=noted[1], pid=int(noted[2]), loader=worker, worker=int(noted[4] or 0))
    if sampled := SAMPLED.search(notes):
        cpu_s, of_s, same_s = map(float, sampled.groups())
        return replace(found, cpu=cpu_s / of_s if of_s else None, same_s=same_s)
    return found


def _place_of(frames: Sequence[re.Match[str]]) -> Place:
    """Return where a thread is, according to its frames. The innermost frame is first."""
    program = [one for one in frames if not (BELOW_PROGRAMS.search(one["file"]) or is_of_hpcinit(one["file"]))]
    # If the program is an installed package (`-m package`), the stack has no frame of the user's code.
    frame = next((one for one in program if is_user_code(one["file"])), program[-1] if program else None)
    at = f"{PurePath(frame['file']).name}:{frame['line']} in {frame['name']}" if frame else ""
    loader = any(one["file"].endswith(LOADER[0]) and one["name"] in LOADER[1:] for one in frames)
    return Place(_collective(frames), at, outside=bool(frames) and not program, loader="its DataLoader worker" * loader)


def _collective(frames: Sequence[re.Match[str]]) -> str:
    """Return the outermost torch function in which a thread waits.

    For example, if all_gather_object has called all_gather, return all_gather_object.
    """
    names = [frame["name"] for frame in frames if frame["file"].endswith(COLLECTIVES)]
    public = [name for name in names if not name.startswith("_") and name != "wrapper"]
    if public:
        return public[-1]
    back = (frame["file"].endswith(BACKWARD[0]) and frame["name"] == BACKWARD[1] for frame in frames)
    return "backward" if any(back) else ""


def _main_frames(text: str) -> Iterator[re.Match[str]]:
    """Yield the frames of the main thread, innermost first."""
    first, _, rest = text.partition("\n")
    main = first.rpartition(" ")[2]
    inside = False
    for line in rest.splitlines():
        if thread := THREAD.match(line):
            inside = thread[1] == main
        elif inside and (frame := FRAME.match(line)):
            yield frame


_TRACED = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+), in (?P<name>.+)')  # as Python prints a traceback


def place_of_error(traceback: str) -> Place:
    """Return where in the program an error was raised, according to Python's traceback."""
    frames = [found for line in traceback.splitlines() if (found := _TRACED.match(line))]
    return _place_of(frames[::-1])


def places(folder: Path, since: float = 0.0) -> dict[int, Place]:
    """Return where the main thread of each rank is, from the stack files in `folder` (hang/JOB of a run).

    since: skip stacks written before this time, by the clock of the file system.
    """
    found = {}
    with contextlib.suppress(OSError):  # an error of the disk: use what could be read
        for path in folder.glob(STACK.format(rank="*")):
            number = path.stem.rpartition("-")[2]
            if number.isdigit() and path.stat().st_mtime >= since:
                found[int(number)] = place(safe_files.read_text(path))
    return found


@dataclass(frozen=True)
class Waiting:
    """Ranks that are waiting in the same collective, called from the same line of the program."""

    ranks: tuple[int, ...] = ()
    collective: str = ""
    called_at: str = ""

    def __str__(self) -> str:
        at = f", called at {self.called_at}" if self.called_at else ""
        return f"{rank_names(self.ranks)} wait{'s' * (len(self.ranks) == 1)} in {self.collective}{at}"


def different_call(calls: Sequence[Waiting]) -> Waiting | None:
    """Return the ranks that wait in a different collective call than most ranks.

    Return None unless there are exactly two calls, and one of them has fewer ranks.
    """
    if len(calls) != 2:
        return None
    few, many = sorted(calls, key=lambda call: len(call.ranks))
    return few if len(few.ranks) < len(many.ranks) else None


@dataclass(frozen=True)
class SilentNode:
    """A node that hasn't sent a heartbeat for `silent_s` seconds, and the ranks that it runs."""

    host: str = ""
    silent_s: float = 0.0
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"node {self.host} has sent no heartbeat for {self.silent_s:.0f} s; it runs {rank_names(self.ranks)}"


@dataclass(frozen=True)
class StuckRank:
    """A rank that is not waiting in a collective.

    state: ELSEWHERE if the rank wrote a stack, ENDED if its program has ended or has not started, or else the state of
        its process as in RankHeartbeat.state.
    at: the line of the program, or '' if unknown. If C code holds the GIL, this is the line that called the C code.
    loader, worker: the same as in Place.
    """

    rank: int = -1
    host: str = ""
    pid: int = 0
    state: str = ""
    at: str = ""
    loader: str = ""
    worker: int = 0

    def __str__(self) -> str:
        who = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        if self.state == ENDED:
            return f"{who} is not running its program: the program has ended, or has not started"
        if self.loader:
            return f"{who} waits for {self.loader}, at {self.at or 'an unknown line'}"
        if self.state == ELSEWHERE:
            return f"{who} is not in a collective: it is at {self.at or 'an unknown line'}"
        return f"{who} does not respond: {_state(self.state, self.pid, self.at)}"


@dataclass(frozen=True)
class HangReport:
    """Which ranks hang, and which rank or node they are waiting for.

    A report is stored as fields in report.json and as text in report.txt.

    rank, host, state: the rank at fault. If a whole node is at fault, rank is None. If the culprit is unknown, all
        three are empty.
    silent_s: seconds since any rank took a step, or None if no rank has taken one.
    last_steps: pairs of a step and the ranks that reported it as their last.
    unheard: ranks that sent no heartbeat and wrote no stack.
    text: the message of the rank that ended the run, if report.json cannot be read.

    For a program that reports no steps, the report also has these fields:

    output_silent_s: seconds since any rank printed something.
    cpu: pairs of a CPU use, in percent of one core, and the ranks that use that much.
    certain: whether this is certainly a hang. This is so if some ranks wait in a collective for others, and each
        running rank has stayed in the same function for at least half of output_silent_s.
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
    output_silent_s: float | None = None
    cpu: tuple[tuple[int, tuple[int, ...]], ...] = ()
    certain: bool = False

    @property
    def nobody_waits(self) -> bool:
        """Return whether all ranks are running the program and none is waiting in a collective.

        Such ranks may be busy with data, or wait for a GPU. Only the flight recorder's dumps can show which.
        """
        shown = self.waiting or self.silent_nodes or self.unheard or self.text
        return not shown and all(one.state == ELSEWHERE and not one.loader for one in self.stuck)

    @property
    def shows_who_is_late(self) -> bool:
        """Return whether ranks wait in a collective and the report names the rank or node for which they wait."""
        late = self.rank is not None or self.silent_nodes or self.unheard or different_call(self.waiting)
        return bool(self.waiting and late)

    @property
    def headline(self) -> str:
        """Return the sentence about the rank or node at fault, or the first sentence of the report if there is none."""
        blamed = () if self.nobody_waits else (*self.silent_nodes, *self.stuck)
        return next(map(str, blamed), "") or self.lines()[0]

    def lines(self) -> tuple[str, ...]:
        """Return the report as lines of text. There is always at least one line."""
        if self.text:
            return self.text
        silence = _silence(self.silent_s, self.last_steps)
        if self.output_silent_s is not None:
            silence = f"no rank has printed anything for {duration(self.output_silent_s)}"
        found = [silence, *map(str, self.waiting)]
        if self.unheard:
            found.append(f"{rank_names(self.unheard)} sent no heartbeat and wrote no stack")
        used = ", ".join(f"{rank_names(ranks)} {percent} %" for percent, ranks in self.cpu)
        return (
            *found,
            *map(str, self.silent_nodes),
            *map(str, self.stuck[:MOST_STUCK]),
            *([f"and {counted(more, 'more rank')}"] if (more := len(self.stuck) - MOST_STUCK) > 0 else []),
            *([f"CPU time, in percent of a core: {used}"] if used else []),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def from_document(document: Mapping[str, Any]) -> HangReport:
    """Return the HangReport in the content of report.json. Missing keys count as empty.

    Unknown keys are ignored. Raise ValueError, TypeError or AttributeError for values of the wrong type.
    """
    report = run_folder.from_known_fields(HangReport, document)
    report.lines()  # raises an error if a field has a value of the wrong type
    return report


def report(
    nodes: Sequence[NodeHeartbeats], stacks: Mapping[int, Place], now_s: float, size: int, fresh_s: float = DEAD_S
) -> HangReport:
    """Return the hang report: when the last step was, which ranks wait in which collective, and which don't wait.

    now_s: the current time in seconds since 1970. It is compared with the last heartbeat of each node.
    size: the world size.
    fresh_s: after how many seconds without a heartbeat a node counts as silent, if it has several ranks, and none
        of them has a stack or a bad state. For any other node, the limit is DEAD_S.
    """
    by_rank = {heartbeat.rank: (node.host, heartbeat) for node in nodes for heartbeat in node.heartbeats}
    silent_s, last_steps = _last([heartbeat for _, heartbeat in by_rank.values()])
    waiting = _waiting(stacks)
    unheard = sorted(set(range(size)) - set(by_rank) - set(stacks))
    for rank, where in stacks.items():  # a rank without a heartbeat has reported no step yet
        by_rank.setdefault(rank, (where.host, RankHeartbeat(rank, where.pid, -1, None)))
    silent = []
    for node in nodes:
        # If none of several ranks has a stack or a bad state, the node or its disk is at fault, so fresh_s is enough.
        # Otherwise, a node's clock that is wrong by seconds must not make the node look silent.
        explained = any(heartbeat.rank in stacks or heartbeat.state for heartbeat in node.heartbeats)
        if now_s - node.time > (fresh_s if len(node.heartbeats) > 1 and not explained else DEAD_S):
            ranks = tuple(heartbeat.rank for heartbeat in node.heartbeats)
            silent.append(SilentNode(node.host, now_s - node.time, ranks))
            by_rank = {rank: found for rank, found in by_rank.items() if rank not in ranks}
    stuck = []
    for rank, (host, heartbeat) in sorted(by_rank.items()):
        found = stacks.get(rank)
        if found is None:
            stuck.append(StuckRank(rank, host, heartbeat.pid, heartbeat.state))
        elif not found.waits_in:
            stuck.append(_elsewhere(rank, host, heartbeat.pid, found))
    stuck = _to_blame(stuck, waiting)
    first = stuck[0] if stuck and not silent else StuckRank(host=silent[0].host if silent else "")
    if HangReport(waiting=waiting, unheard=tuple(unheard), stuck=tuple(stuck)).nobody_waits:
        first = StuckRank(host=first.host if silent else "")
    return HangReport(
        rank=first.rank if first.rank >= 0 else None,
        host=first.host,
        state=first.state,
        silent_s=silent_s,
        last_steps=last_steps,
        waiting=waiting,
        unheard=tuple(unheard),
        silent_nodes=tuple(silent),
        stuck=tuple(stuck),
    )


def _waiting(stacks: Mapping[int, Place]) -> tuple[Waiting, ...]:
    """Return the ranks that wait in a collective, one Waiting per call. The call with the most ranks is first."""
    together: dict[tuple[str, str], list[int]] = {}
    for rank, where in sorted(stacks.items()):
        if where.waits_in:
            together.setdefault((where.waits_in, where.at), []).append(rank)
    found = (Waiting(tuple(ranks), *call) for call, ranks in together.items())
    return tuple(sorted(found, key=lambda one: -len(one.ranks)))


def before_errors(stacks: Mapping[int, Place], raised: Mapping[int, Place]) -> dict[int, Place]:
    """Return where each rank is in its program.

    If the program had already failed when its rank wrote the stack, return the place of the error instead.

    stacks: the place in each rank's stack.
    raised: the place of the error, for each rank whose program raised one.
    """
    return {rank: raised.get(rank, where) if where.outside else where for rank, where in stacks.items()}


def without_output(
    run: Path, job_id: str, restart: object, now_s: float | None = None, raised: Mapping[int, Place] | None = None
) -> HangReport | None:
    """Return a hang report for ranks that report no steps, or None if a rank still prints something.

    now_s: the current time in seconds since 1970, or None if the job no longer runs.
    raised: for each rank with a timeout error, the place of the collective that timed out.
    """
    for folder in _folders(run, SILENT, job_id, restart):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            marker, noted = safe_files.read_json(folder / SILENT), (folder / SILENT).stat().st_mtime
            silent_s, complete = float(marker["silent_s"]), marker.get("complete") is True
            # Older stacks are from an earlier silence. Subtract 1 s more, because silent_s is rounded.
            stacks = places(folder, noted - silent_s - 1.0)
            stacks = before_errors(stacks, raised or {})
            if now_s is not None:
                silent_s += max(0.0, now_s - noted)
            attempt = timeline.read_attempt(run / run_folder.TIMELINE / folder.name)
            return _without_output(silent_s, stacks, attempt, complete)
    return None


def _without_output(
    silent_s: float, stacks: Mapping[int, Place], attempt: timeline.Attempt | None, complete: bool
) -> HangReport:
    ranks = {one.rank: one for one in attempt.ranks} if attempt else {}
    ended = {rank for rank, one in ranks.items() if one.returned is not None}
    stacks = {rank: where for rank, where in stacks.items() if rank not in ended}
    waiting = _waiting(stacks)
    stuck = []
    for rank in sorted({*range(attempt.world_size if attempt else 0), *stacks}):
        host, pid = (ranks[rank].host, ranks[rank].pid) if rank in ranks else ("", 0)
        if rank in ended:
            stuck.append(StuckRank(rank, host, pid, ENDED))
        elif rank not in stacks:
            stuck.append(StuckRank(rank, host, pid))
        elif not stacks[rank].waits_in:
            stuck.append(_elsewhere(rank, host, pid, stacks[rank]))
    stuck = _to_blame(stuck, waiting)
    used: dict[int, list[int]] = {}
    for rank, where in sorted(stacks.items()):
        if where.cpu is not None:
            used.setdefault(round(100 * where.cpu), []).append(rank)
    first = stuck[0] if waiting and stuck else StuckRank()
    return HangReport(
        rank=first.rank if first.rank >= 0 else None,
        host=first.host,
        state=first.state,
        waiting=waiting,
        stuck=tuple(stuck),
        output_silent_s=silent_s,
        cpu=tuple((percent, tuple(found)) for percent, found in sorted(used.items(), reverse=True)),
        certain=bool(waiting and stuck)
        and (complete or stacks.keys() | ended >= ranks.keys())
        and all(one.same_s >= SAME_SHARE * silent_s for one in stacks.values()),
    )


def _elsewhere(rank: int, host: str, pid: int, where: Place) -> StuckRank:
    return StuckRank(rank, host, pid, ENDED if where.outside else ELSEWHERE, where.at, where.loader, where.worker)


def _to_blame(stuck: Sequence[StuckRank], waiting: Collection[object]) -> list[StuckRank]:
    """Return the stuck ranks for which other ranks may be waiting.

    These are the ranks that are still in their program. If there are none, but other ranks wait in a collective,
    return the ranks whose program has ended.
    """
    inside = [one for one in stuck if one.state != ENDED]
    return inside or (list(stuck) if waiting else [])


def with_states(report: HangReport, now: Mapping[int, tuple[str, str]]) -> HangReport:
    """Return the report with the current state of each rank that wrote no stack.

    now: the state and the line of each rank, as in StuckRank.
    """
    stuck = []
    for one in report.stuck:
        known = one.rank in now and one.state in ("", MUTE)
        stuck.append(replace(one, state=now[one.rank][0], at=now[one.rank][1]) if known else one)
    own = next((one.state for one in stuck if one.rank == report.rank), report.state)
    return replace(report, stuck=tuple(stuck), state=own)


def left(run: Path, job_id: str, restart: object) -> HangReport | None:
    """Return the hang report of an attempt, from the run's folder hang/JOB.STEP.RESTART, or None if there is none.

    job_id: the id of the job. For a task of an array, such as '18_1', folders of all job ids match, because Slurm uses
        another id for its steps.
    restart: the number of the restart, or None for any.
    """
    for folder in _folders(run, RECORD, job_id, restart):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            return from_document(safe_files.read_json(folder / RECORD))
    return None


def _folders(run: Path, name: str, job_id: str, restart: object) -> Iterator[Path]:
    """Yield the folders hang/JOB.STEP.RESTART of an attempt that contain a file with this name."""
    for folder in sorted(path.parent for path in (run / run_folder.HANG_REPORTS).glob(f"*/{name}")):
        job, _, rest = folder.name.partition(".")
        if ("_" in job_id or job == scratch.folder_name(job_id)) and (
            restart is None or rest.rpartition(".")[2] in ("", str(restart))
        ):
            yield folder


def _last(heartbeats: Sequence[RankHeartbeat]) -> tuple[float | None, tuple[tuple[int, tuple[int, ...]], ...]]:
    """Return how many seconds ago any rank took a step, and which ranks reported which step as their last.

    A rank whose heartbeat thread doesn't run is not listed, because it may have finished later steps.
    """
    reported = [heartbeat for heartbeat in heartbeats if heartbeat.silent_s is not None]
    steps: dict[int, list[int]] = {}
    for heartbeat in reported:
        if not heartbeat.state:
            steps.setdefault(heartbeat.step, []).append(heartbeat.rank)
    since = min((heartbeat.silent_s or 0.0 for heartbeat in reported), default=None)
    return since, tuple((step, tuple(ranks)) for step, ranks in sorted(steps.items()))


def _silence(silent_s: float | None, last_steps: Sequence[tuple[int, Sequence[int]]]) -> str:
    if silent_s is None:
        return "no rank has reported a step yet"
    steps = ", ".join(f"{rank_names(ranks)} last finished step {step}" for step, ranks in last_steps)
    return f"no step for {silent_s:.0f} s" + (f"; {steps}" if steps else "")


def duration(seconds: float) -> str:
    """Return a duration as text, such as '45 s' or '4 min'."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _state(state: str, pid: int, at: str) -> str:
    called = f", called at {at}," if at else ""
    sentences = {
        STOPPED: f"process {pid} is stopped (SIGSTOP, or a debugger); to continue it: kill -CONT {pid}",
        IN_KERNEL: f"process {pid} waits in the kernel for a disk or a driver",
        GONE: f"process {pid} has exited",
        MUTE: f"process {pid} runs C code that holds the GIL{called or ','} so none of its other threads can run",
    }
    return sentences.get(state, f"process {pid} wrote no stack")
