"""`hpcinit stacks RUN`: shows where every rank is now. Equal stacks are listed once, unusual ones first."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import re
import subprocess
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from hpcinit.base import console, json_output
from hpcinit.base.errors import Failure, RequestError
from hpcinit.base.text import counted, rank_names
from hpcinit.observe import find_runs, job_step, logs, stack_collector
from hpcinit.records import hang_report, heartbeats
from hpcinit.records.starts import STARTS
from hpcinit.slurm import nodelist, slurm_client
from hpcinit.slurm.slurm_client import NotStarted

SAMPLES, APART_S = 3, 0.4
TIMEOUT_S = 20.0  # how long to wait for the first node
LATE_S = 4.0  # how long to wait for each further node
MOST_FRAMES = 8
STOPPED, IN_KERNEL, GIL = "stopped", "in the kernel", "holds the GIL"  # values of RankStack.state
NO_STACK, STUCK, MOVING = "no stack", "same", "moving"
ORDER = (STOPPED, IN_KERNEL, GIL)  # these groups are first
HEARTBEAT_STATES = {STOPPED: heartbeats.STOPPED, IN_KERNEL: heartbeats.IN_KERNEL, GIL: heartbeats.MUTE}

STARTED_BY = re.compile(r"/hpcinit/(?:launch/|runtime/program\.py|(?:cli/main|run|fork)\.py$)|^<frozen|/runpy\.py$")
Frame = tuple[str, int, str]  # file, line (0 if it differs between the samples), function


@dataclass(frozen=True)
class RankStack:
    """The stack and the state of one rank.

    state: one of the constants STOPPED, IN_KERNEL, GIL (C code holds the GIL), NO_STACK, STUCK (all samples are equal)
        or MOVING (the samples differ).
    frames: the stack of the main thread.
    wchan: the kernel function in which the main thread is waiting, or '' if it is unknown.
    same: how many samples have the same stack as the last sample.
    note: why there is no stack.
    """

    rank: int
    host: str
    pid: int
    state: str
    frames: tuple[Frame, ...] = ()
    wchan: str = ""
    same: int = 0
    samples: int = 0
    cpu_s: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Ranks that have the same stack and state.

    first: the first of these ranks.
    place: where in the program's own code these ranks are.
    cpu_s: the smallest and the largest CPU time of these ranks.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    first: RankStack
    place: hang_report.Place
    cpu_s: tuple[float, float]

    def headline(self) -> str:
        one = self.first
        who = f"{rank_names(self.ranks)} on {nodelist.compress(self.hosts)}"
        return f"{who}: {', '.join(part for part in self._what() if part)}" + self._advice(one.state)

    def _what(self) -> list[str]:
        one, where = self.first, self.place
        if one.state == STOPPED:
            return ["stopped (SIGSTOP, or a debugger)"]
        verb = f"wait{'s' * (len(self.ranks) == 1)}"
        waits = (
            f"{verb} in {where.waits_in}" if where.waits_in else f"{verb} for {where.loader}" if where.loader else ""
        )
        at = (
            f"{'called ' if where.waits_in else ''}at {where.at}" if where.at else "outside the program" * where.outside
        )
        place = " ".join(part for part in (waits, at) if part)
        low, high = (f"{seconds:.1f}" for seconds in self.cpu_s)
        used = f"used {low}{f' to {high}' * (low != high)} s of CPU"
        same = f"the same line in {one.same} of {one.samples} samples"
        if one.state == IN_KERNEL:
            inside = f" in {one.wchan}" if one.wchan else ""
            return [f"waits in the kernel{inside} (state D: a disk, a file server or a driver)", place, used]
        if one.state == GIL:
            return [f"holds the GIL in {one.samples} of {one.samples} samples", place, same, used]
        if one.state == NO_STACK:
            inside = f"waits in the kernel function {one.wchan}" if one.wchan else ""
            return [f"no Python stack ({one.note})" if one.note else "no Python stack", inside, used]
        if one.state == MOVING:
            return ["moving", place, used]
        return [place, same, used]

    def _advice(self, state: str) -> str:
        if state == STOPPED:
            return f"; to continue: kill -CONT {' '.join(map(str, self.pids))}"
        if state == NO_STACK:
            return (
                f"; to see it: hpcinit exec RUN --rank {self.ranks[0]} -- sh -c 'py-spy dump --pid $HPCINIT_RANK_PID'"
            )
        return ""

    def document(self) -> dict[str, Any]:
        one = self.first
        return {
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
            "pids": list(self.pids),
            "state": one.state,
            "waits_in": self.place.waits_in,
            "at": self.place.at,
            "wchan": one.wchan,
            "same": one.same,
            "samples": one.samples,
            "cpu_s": [round(seconds, 2) for seconds in self.cpu_s],
            "note": one.note,
            "frames": [{"file": file, "line": line or None, "function": name} for file, line, name in one.frames],
        }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit stacks",
        description="Show where every rank of a running run is now: its Python stack, the state of its process and its "
        "CPU time, from three samples. Equal stacks are listed once, unusual ones first. The run is not interrupted.",
    )
    parser.add_argument("run", help="run folder, its name, or a job id")
    find_runs.add_runs_dir(parser)
    parser.add_argument("--rank", default="", metavar="RANKS", help="only these ranks, with all frames: 3, or 0,4-7")
    return console.add_verbosity_options(parser, "one JSON object: groups of ranks, missing ranks, silent nodes")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    wanted = logs.parse_ranks(options.rank) if options.rank else []
    job = job_step.running(options.run, options.runs_dir)
    nodes = list(dict.fromkeys(job.host(rank) for rank in wanted)) or list(job.nodes)
    reports, error = _ask(job, nodes, wanted)
    silent = (
        []
        if not job.engine.other_machines
        else [node for node in nodes if node not in {one["host"] for one in reports}]
    )
    if silent and not reports:
        raise Failure(
            f"no node of job {job.job_id} answered: {error or 'the step printed nothing'}. The run is not affected, "
            "because hpcinit stacks uses a separate job step (srun --overlap)"
        )
    ranks = [rank_stack(one, report["host"]) for report in reports for one in report["ranks"]]
    groups = fold(ranks)
    expected = set(wanted) if wanted else set(range(job.spec.world_size))
    missing = sorted(expected - {one.rank for one in ranks})
    if options.json:
        document = {
            "run": str(job.path),
            "job_id": job.job_id,
            "samples": SAMPLES,
            "groups": [group.document() for group in groups],
            "missing": missing,
            "silent_nodes": silent,
            "error": error if silent else "",
        }
        print(json_output.line("stacks", document))
        return 0
    most = 0 if options.quiet else None if wanted else MOST_FRAMES
    for line in lines(groups, missing, silent, most):
        print(line)
    if silent and error:
        console.message(f"Slurm: {error}")
    return 0


def groups_now(run: Path) -> list[Group]:
    """Return the groups of ranks of a running run, unusual groups first. Return [] if no node answers."""
    with contextlib.suppress(Failure, RequestError, OSError):
        job = job_step.running(str(run), run.parent)
        reports, _ = _ask(job, job.nodes, [])
        return fold(rank_stack(one, report["host"]) for report in reports for one in report["ranks"])
    return []


def blocked_ranks(groups: Iterable[Group]) -> dict[int, tuple[str, str]]:
    """Return (state, line of the program) for each rank that can't run Python code.

    The state is as in hang_report.StuckRank. If C code holds the GIL, the line is where the program called this code.
    Otherwise, the line is ''.
    """
    bad = [group for group in groups if group.first.state in HEARTBEAT_STATES]
    return {
        rank: (HEARTBEAT_STATES[group.first.state], group.place.at if group.first.state == GIL else "")
        for group in bad
        for rank in group.ranks
    }


def _ask(job: job_step.RunningJob, nodes: Sequence[str], wanted: Sequence[int]) -> tuple[list[dict[str, Any]], str]:
    """Return the reports of the nodes that answered, and Slurm's error output or ''."""
    asked = {
        "run": str(job.path),
        "slurm": job.engine.uses_slurm,
        "tasks": STARTS[job.spec.launch.kind].task_per_rank,
        "ranks": list(wanted),
        "samples": SAMPLES,
        "apart_s": APART_S,
    }
    command = job_step.collector(asked)
    env = job_step.environment(slurm_client.environment())
    if not job.engine.other_machines:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            raise Failure(f"cannot read the stacks of the processes on this machine: {done.stderr.strip()}")
        return decoded(done.stdout.splitlines()), ""
    step = job_step.srun(job, nodes, command, ("--input=none", "--wait=0", "--kill-on-bad-exit=0"))
    try:
        call = slurm_client.start(step, env)
    except NotStarted as error:
        raise Failure(f"{error}: run this on the machine where the job was submitted") from None
    begin = last = time.monotonic()
    found: list[dict[str, Any]] = []
    while not call.ends_within(0.1):
        before, found = len(found), decoded(call.printed.splitlines())
        now = time.monotonic()
        last = now if len(found) > before else last
        if (found and now - last > LATE_S) or now - begin > TIMEOUT_S:
            call.drop()
            return found, ""
    answer = call.output()
    return decoded(answer.stdout.splitlines()), answer.stderr.strip() if answer.status else ""


def decoded(printed: Iterable[str]) -> list[dict[str, Any]]:
    """Return the complete documents in the output of stack_collector.encoded(), sorted by host."""
    parts: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for line in printed:
        words = line.split()
        if len(words) == 5 and words[0] == stack_collector.PREFIX:
            parts.setdefault(words[1], {})[int(words[2])] = words[4]
            counts[words[1]] = int(words[3])
    found = []
    for host, chunks in sorted(parts.items()):
        if len(chunks) == counts[host]:
            data = "".join(chunks[at] for at in range(len(chunks)))
            found.append(json.loads(zlib.decompress(base64.b64decode(data))))
    return found


def rank_stack(sampled: Mapping[str, Any], host: str) -> RankStack:
    """Compute the stack and the state of one rank from its samples."""
    samples = sampled["samples"]
    stacks = [_frames(one.get("frames", ())) for one in samples]
    last = stacks[-1] if stacks else ()
    same = sum(stack == last for stack in stacks)
    states = {one["state"] for one in samples}
    frames = last
    if states and states <= {"T", "t"}:
        state = STOPPED
    elif states == {"D"}:
        state = IN_KERNEL
    elif not all(stacks) or not stacks:
        state = NO_STACK
    elif same < len(stacks):
        state, frames = MOVING, common(stacks)
    else:
        state = GIL if sampled["gil_kept"] else STUCK
    wchan = {one.get("wchan", "") for one in samples}
    return RankStack(
        sampled["rank"],
        host,
        sampled["pid"],
        state,
        frames,
        wchan.pop() if len(wchan) == 1 else "",
        same,
        len(samples),
        sampled["cpu_s"] or 0.0,
        "" if sampled["python"] else f"it is not a Python process: {sampled['title']}",
    )


def _frames(found: Iterable[Sequence[Any]]) -> tuple[Frame, ...]:
    """Return the frames of the program, without the outer frames in which hpcinit starts it.

    If the program has no frame, return all frames.
    """
    frames = tuple((str(file), int(line), str(name)) for file, line, name in found)
    end = len(frames)
    while end and STARTED_BY.search(frames[end - 1][0]):
        end -= 1
    return frames[: end or None]


def common(stacks: Sequence[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """Return the outermost frames that all samples share, innermost frame first.

    If the samples then continue on different lines of the same function, add this function with line 0.
    """
    shared: list[Frame] = []
    for frames in zip(*(reversed(stack) for stack in stacks), strict=False):
        if len(set(frames)) > 1:
            if len({(file, name) for file, _, name in frames}) == 1:
                shared.append((frames[0][0], 0, frames[0][2]))
            break
        shared.append(frames[0])
    return tuple(reversed(shared))


def fold(ranks: Iterable[RankStack]) -> list[Group]:
    """Group the ranks that have equal stacks. Groups in a bad state are first, then small groups.

    Among groups of the same size, those that wait in a collective are last.
    """
    together: dict[tuple[object, ...], list[RankStack]] = {}
    for one in sorted(ranks, key=lambda one: (one.rank, one.pid)):
        wchan = one.wchan if one.state in (IN_KERNEL, NO_STACK) else ""
        key = (one.state, one.frames, wchan, one.note if one.state == NO_STACK else "")
        together.setdefault(key, []).append(one)
    groups = [_group(members) for members in together.values()]

    def oddness(group: Group) -> tuple[int, int, bool, tuple[int, ...]]:
        bad = ORDER.index(group.first.state) if group.first.state in ORDER else len(ORDER)
        return bad, len(group.ranks), bool(group.place.waits_in), group.ranks

    return sorted(groups, key=oddness)


def _group(members: Sequence[RankStack]) -> Group:
    used = [one.cpu_s for one in members]
    place = hang_report.place(_as_text(members[0].frames))
    return Group(
        tuple(one.rank for one in members),
        tuple(dict.fromkeys(one.host for one in members)),
        tuple(one.pid for one in members),
        members[0],
        replace(place, at=place.at.replace(":0 in ", " in ")),
        (min(used), max(used)),
    )


def _as_text(frames: Iterable[Frame]) -> str:
    """Return the frames as text in the format of faulthandler, which hang_report.place() reads."""
    shown = "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in frames)
    return f"main thread 0x1\n\nThread 0x1 (most recent call first):\n{shown}\n"


def lines(
    groups: Sequence[Group], missing: Sequence[int], silent: Sequence[str], most: int | None = MOST_FRAMES
) -> Iterable[str]:
    """Yield the lines that `hpcinit stacks` prints.

    missing: ranks without a process.
    silent: nodes that did not answer.
    most: how many frames to print per stack; None: all.
    """
    if silent:
        yield f"no answer from {nodelist.compress(silent)}: is it down? The other nodes answered"
    if missing:
        where = " on the nodes that answered" if silent else ""
        yield f"no process of {rank_names(missing)}{where}: exited, or not started yet"
    for group in groups:
        yield group.headline()
        frames = group.first.frames
        for file, line, name in frames[:most]:
            yield f"    {name} ({_short(file)}{f':{line}' if line else ''})"
        if most and len(frames) > most:
            yield f"    and {counted(len(frames) - most, 'more frame')} (--rank {group.ranks[0]})"


def _short(file: str) -> str:
    """Return the name of a file, or for a file in an installed package its path below site-packages."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    return PurePath(file).name
