"""Who waits for whom: from the stacks that silent ranks leave, and from what their nodes see of them.

hang/JOB/rank-N.txt, one folder for each attempt, is what faulthandler writes, below a first line 'main thread 0x...'.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from hpcinit.facts import scratch
from hpcinit.facts.beats import Beat, Node
from hpcinit.facts.ranges import ranges

FOLDER = "hang"
STACK = "rank-{rank}.txt"
REPORT = "report.txt"
NODE = "node.txt"  # beside it, for the batch script: the node at fault
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


def report(
    nodes: Sequence[Node], stacks: Mapping[int, Place], now_s: float, size: int, fresh_s: float = DEAD_S
) -> list[str]:
    """Lines for a person: how long nothing has happened, who waits in what, and who has not come there.

    now_s: in seconds since 1970, against which a node that says nothing any more is told. size: of the world.
    fresh_s: how old a node's last word may be while one of its ranks runs.
    """
    beats = {beat.rank: (node.host, beat) for node in nodes for beat in node.beats}
    lines = [_silence([beat for _, beat in beats.values()])]
    waiting: dict[tuple[str, str], list[int]] = {}
    for rank, where in stacks.items():
        if where.waits_in:
            waiting.setdefault((where.waits_in, where.at), []).append(rank)
    for (what, at), ranks in sorted(waiting.items(), key=lambda item: -len(item[1])):
        lines.append(f"{_ranks(ranks)} wait{'s' * (len(ranks) == 1)} in {what}, called at {at}")
    if unheard := sorted(set(range(size)) - set(beats) - set(stacks)):
        lines.append(f"{_ranks(unheard)} {'have' if len(unheard) > 1 else 'has'} never said anything")
    for node in nodes:
        if _is_silent(node, stacks, now_s, fresh_s):
            ranks = [beat.rank for beat in node.beats]
            lines.append(f"node {node.host} has said nothing for {now_s - node.time:.0f} s: {_ranks(ranks)} ran there")
            beats = {rank: found for rank, found in beats.items() if rank not in ranks}
    for rank, (host, beat) in sorted(beats.items()):
        found = stacks.get(rank)
        if found is None:
            lines.append(f"rank {rank} on {host} cannot be asked: {_state(beat)}")
        elif not found.waits_in:
            lines.append(f"rank {rank} on {host} has not come to a collective: it is at {found.at or 'no Python line'}")
    return lines


def host_at_fault(nodes: Sequence[Node], stacks: Mapping[int, Place], now_s: float, fresh_s: float = DEAD_S) -> str:
    """Return the first host that report() names, '' where it names none."""
    if silent := [node.host for node in nodes if _is_silent(node, stacks, now_s, fresh_s)]:
        return silent[0]
    ranks = sorted((beat.rank, node.host) for node in nodes for beat in node.beats)
    return next((host for rank, host in ranks if rank not in stacks or not stacks[rank].waits_in), "")


def _is_silent(node: Node, stacks: Mapping[int, Place], now_s: float, fresh_s: float) -> bool:
    # Several ranks, no stack of any, and none that the others saw in trouble: that is the node, or its disk. So a
    # clock that is off by seconds blames nobody.
    whole = len(node.beats) > 1 and not any(beat.rank in stacks or beat.state for beat in node.beats)
    return now_s - node.time > (fresh_s if whole else DEAD_S)


def left(run: Path, job_id: str, restart: object) -> tuple[str, ...]:
    """Lines of the report in the run folder `run`, of an attempt's steps, whose folders are JOB.STEP.RESTART.

    restart: a number, or None where nobody says which. job_id: of a task '18_1', whose steps have another number of
    Slurm's, and whose folder no other job has.
    """
    for path in sorted((run / FOLDER).glob(f"*/{REPORT}")):
        job, _, rest = path.parent.name.partition(".")
        if ("_" in job_id or job == scratch.folder_name(job_id)) and (
            restart is None or rest.rpartition(".")[2] in ("", str(restart))
        ):
            try:
                return tuple(path.read_text(errors="replace").splitlines())
            except OSError:
                return ()
    return ()


def to_blame(lines: Sequence[str]) -> str:
    """Of the lines of a report the one that names who the others wait for; the first where none does."""
    marks = ("cannot be asked", "has not come to", "has said nothing")
    return next((line for line in lines if any(mark in line for mark in marks)), lines[0])


def _silence(beats: Sequence[Beat]) -> str:
    spoken = [beat for beat in beats if beat.silent_s is not None]
    if not spoken:
        return "no rank has told a step yet"
    since = min(beat.silent_s or 0.0 for beat in spoken)
    steps: dict[int, list[int]] = {}
    for beat in spoken:
        steps.setdefault(beat.step, []).append(beat.rank)
    told = ", ".join(f"step {step} by {_ranks(ranks)}" for step, ranks in sorted(steps.items()))
    return f"no step for {since:.0f} s; last told: {told}"


def _state(beat: Beat) -> str:
    words = {
        "stopped": f"process {beat.pid} is stopped (SIGSTOP, or a debugger); kill -CONT {beat.pid} lets it go on",
        "in the kernel": f"process {beat.pid} waits in the kernel, for a disk or a driver",
        "gone": f"process {beat.pid} is gone",
        "mute": f"process {beat.pid} runs and lets no other thread run: it is in C code that keeps Python's lock",
    }
    return words.get(beat.state, f"process {beat.pid} left no stack")


def _ranks(found: Sequence[int]) -> str:
    return f"rank{'s' * (len(found) > 1)} {ranges(found)}"
