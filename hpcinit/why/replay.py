"""Checks the verdict on a hang with a replay: a gloo program makes the calls in the dumps.

The program must block at the same call as the job, and it must finish after the fault is repaired
(why/replay_program.py). If it does not, the verdict is wrong: it blames a rank that only waits, or misses a rank at
fault. jobs/replay_ranks.py runs the programs with one process per rank.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted, rank_names
from hpcinit.why import flight_recorder, hang_verdict
from hpcinit.why.flight_recorder import DONE, Operation
from hpcinit.why.hang_verdict import DEVICE_STUCK, MISMATCH, NOT_CALLED
from hpcinit.why.replay_program import PENDING, NotReplayable, Program

CHILD = Path(__file__).parents[1] / "jobs/replay_ranks.py"
LIMIT_S = 300.0  # of both runs together
FINISHED = "f"  # jobs/replay_ranks.py
SHOWN = 3  # calls in a sentence
FAULTS = {NOT_CALLED: "never called", MISMATCH: "called differently", DEVICE_STUCK: "did not finish it"}
REPAIRS = {MISMATCH: "made as the others make them", DEVICE_STUCK: "executed"}
NO_TORCH = (
    "--replay cannot use {} ({}): expected a Python with torch, because the replay uses torch with gloo; "
    "add --python /path/of/the/environment/of/the/job/bin/python"
)
NO_DEVICE = (
    "all ranks have made the calls that do not finish: a device or a link is stuck, and a replay with gloo uses neither"
)


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    text: the result as a sentence.
    ranks, groups, calls: how many were replayed.
    blocked_at: the calls in which ranks wait because the ranks at fault did not make them.
    same_call: whether the replay blocked in the calls that the dumps show as unfinished. None if nothing was replayed.
    finished: whether the repaired program finished. None if there is no repaired program.
    not_replayed: what the replay does not show.
    """

    text: str
    ranks: int = 0
    groups: int = 0
    calls: int = 0
    blocked_at: tuple[str, ...] = ()
    same_call: bool | None = None
    finished: bool | None = None
    not_replayed: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return [self.text, *(f"  not replayed: {line}" for line in self.not_replayed)]


def replay(dumps: Mapping[int, Mapping[str, Any]], ended: Collection[int] = (), python: str = "") -> Replay:
    """Repeat the calls in the dumps with two programs: one with the fault and one without. Return what happened.

    Raise RequestError if the interpreter has no torch.

    ended: the ranks whose program ended with status 0.
    python: an interpreter with torch, or '' for the one that runs this process.
    """
    if flight_recorder.omit_finished_calls(dumps.values()):
        return Replay(f"not replayed: {hang_verdict.ONLY_UNFINISHED}")
    try:
        program = Program(hang_verdict.search(dumps, ended))
        documents = [program.document(repaired=False)]
        if program.blamed:
            documents.append(program.document(repaired=True))
        return judge(program, run(documents, python or sys.executable))
    except NotReplayable as error:
        return Replay(f"not replayed: {error}")


def judge(program: Program, results: Sequence[Mapping[str, Any]]) -> Replay:
    """Return the result of a replay. Raise NotReplayable if the replay itself failed.

    results: what jobs/replay_ranks.py reports about the unchanged and about the repaired program.
    """
    if failed := next((one for one in results if one["error"] or not one["settled"]), None):
        raise NotReplayable(failed["error"] or "a rank of the replay exited too early")
    steps = {rank: program.steps(rank, repaired=False) for rank in program.ranks}
    calls = [(rank, step.operation) for rank, own in steps.items() for step in own]
    done = {call for call, state in zip(calls, "".join(results[0]["states"]), strict=True) if state == FINISHED}
    size = (len(steps), len({group for group, _ in program.states}), len(calls))
    base = Replay("", *size, not_replayed=tuple(_not_replayed(program)))
    text = f"replayed: {', '.join(map(counted, size, ('rank', 'group', 'call')))}"
    # Calls that finish only in the replay, or only in the dumps. The root of a broadcast may finish only in the dumps.
    odd = [
        (rank, one)
        for one, states in program.states.items()
        for rank, state in states.items()
        if ((rank, one) in done and state in PENDING) or ((rank, one) not in done and set(states.values()) == {DONE})
    ]
    if odd and not program.blamed:
        raise NotReplayable(NO_DEVICE)
    if odd:
        return replace(base, same_call=False, text=f"{text}; {_differs(program, odd, done)}")
    blocked = tuple(_blocked_at(program))
    text += "; blocked at the same call" + ": " * bool(blocked) + "; ".join(blocked)
    base = replace(base, blocked_at=blocked, same_call=True)
    if len(results) < 2:
        return replace(base, text=f"{text}; the verdict names no rank whose call could be repaired")
    finished = all(set(states) <= {FINISHED} for states in results[1]["states"])
    end = "the replay finished" if finished else "the replay did not finish, so there is another cause"
    kinds = dict.fromkeys(program.blamed.values())
    repairs = [f"the calls of {_at_fault(program, kind)} {REPAIRS.get(kind, 'added')}" for kind in kinds]
    return replace(base, text=f"{text}; with {' and '.join(repairs)}, {end}", finished=finished)


def _differs(program: Program, odd: Sequence[tuple[int, Operation]], done: Collection[tuple[int, Operation]]) -> str:
    calls = [(rank, "finishes" if (rank, one) in done else "waits in", one) for rank, one in odd[:SHOWN]]
    shown = [f"rank {rank} {does} {program.search.called(one)} here" for rank, does, one in calls]
    reasons = ["the verdict is not confirmed"]
    if any(program.is_queued(one) and not any(program.gates[one].values()) for _, one in odd):
        reasons.append("all ranks have made that call, so a device or a link is stuck")
    if not all(one.complete for one in program.search.ranks.values()):
        reasons.append("a recorder has overwritten its entry of the call that explains it")
    return f"the replay does not block at the same calls ({'; '.join(shown)}): {', or '.join(reasons)}"


def _at_fault(program: Program, kind: str) -> str:
    return rank_names(sorted(rank for rank, other in program.blamed.items() if other == kind))


def _blocked_at(program: Program) -> Iterator[str]:
    for operation in dict.fromkeys(one for one in program.causes.values() if one in program.states):
        ranks = sorted(rank for rank, other in program.causes.items() if other == operation)
        states = program.states[operation]
        waiting = sorted(rank for rank, state in states.items() if state in PENDING and rank not in ranks)
        wait = f"{rank_names(waiting)} wait{'s' * (len(waiting) == 1)}, " if waiting else ""
        fault = FAULTS.get(program.blamed[ranks[0]], "left no dump")
        yield f"{program.search.called(operation)} ({wait}{rank_names(ranks)} {fault})"


def _not_replayed(program: Program) -> Iterator[str]:
    if DEVICE_STUCK in program.blamed.values():
        stuck = _at_fault(program, DEVICE_STUCK)
        yield f"a device that is stuck: {stuck} made no unfinished call in the first run"
    yield from (f"{number} {what}" if number > 1 else what for what, number in program.left.items())
    if missing := sorted(set(program.ranks) - program.search.ranks.keys()):
        text = "hpcinit assumes that a rank at fault made no unfinished call, and that any other rank made them all"
        yield f"what {rank_names(missing)} called: {text}"
    kinds = {program.search.name(one).partition(" ")[0] for one in program.states if isinstance(one[1], int)}
    if kinds := kinds - {"all_reduce"}:
        yield f"{', '.join(sorted(kinds)[:SHOWN])}: all_reduce replaces such calls, so that all ranks wait"


def run(programs: Sequence[Mapping[str, Any]], python: str, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """Run the programs one after the other with jobs/replay_ranks.py. No process is left behind."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pipes |= {"text": True, "errors": "replace", "start_new_session": True}
    with tempfile.TemporaryDirectory(prefix="hpcinit-replay-", ignore_cleanup_errors=True) as folder:
        command = [str(Path(shutil.which(python) or python).absolute()), str(CHILD), str(os.getpid())]
        lines = "".join(f"{json.dumps(program)}\n" for program in programs)
        try:
            process = subprocess.Popen(command, cwd=folder, env=env, **pipes)
        except OSError as error:
            raise RequestError(NO_TORCH.format(python, error.strerror or error)) from None
        with process:
            try:
                out, err = process.communicate(lines, timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise NotReplayable(f"the replay did not end within {limit_s:g} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    results = [json.loads(line) for line in out.splitlines()]
    if results and "no_torch" in results[0]:
        raise RequestError(NO_TORCH.format(python, results[0]["no_torch"]))
    if len(results) < len(programs):
        last = err.strip().rpartition("\n")[2]
        raise NotReplayable(f"the replay ended with exit status {process.returncode}: {last}")
    return results
