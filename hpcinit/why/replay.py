"""Replay a hang: a gloo program with the calls of the dumps must block at the same call, and finish when repaired.

The program has one process per rank and the groups of the dumps. Each rank makes the calls that its dump lists, in
their order. A collective of any kind is an all_reduce of one number, because with gloo the root of a broadcast or a
scatter does not wait for the others. Where ranks make different calls, gloo raises an error and NCCL waits. So a call
that differs is made in a copy of the group, which the other ranks do not use.

A dump ends where its rank waits. A rank that only waits would continue afterwards, so in the replay it makes, after
its unfinished calls, those in which others wait for it. A rank at fault makes them only in the second run, the
repaired one. So if the verdict blames a rank that only waits, or misses one at fault, the first run does not block as
the dumps do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted, rank_names
from hpcinit.why import hang_verdict
from hpcinit.why.flight_recorder import CUT, DONE, FORGOTTEN, SCHEDULED, STARTED, Message, Operation
from hpcinit.why.hang_verdict import DEVICE_STUCK, MISMATCH, NOT_CALLED

CHILD = Path(__file__).parents[1] / "jobs/replay.py"
LIMIT_S = 300.0  # of both runs together
MOST_RANKS = 64
MOST_CALLS = 20_000  # of all ranks together; 3,000 take a second
MOST_UNFINISHED = 2_000
MOST_GROUPS = 256
MOST_STREAMS = 4_000  # threads of all ranks together, without those of gloo
PENDING = (SCHEDULED, STARTED)
FINISHED = "f"  # jobs/replay.py
SHOWN = 3  # calls in a sentence


class Step(NamedTuple):
    """A call of one rank. variant: which of different calls it is, 0 for the usual one. after: places of the rank's
    steps that must have finished."""

    operation: Operation
    variant: int
    after: tuple[int, ...]


class NotReplayable(ValueError):
    """The dumps cannot be replayed. The text is the reason."""


@dataclass(frozen=True)
class Replay:
    """The result. ranks, groups, calls: how many were replayed. blocked_at: in which calls the ranks at fault let the
    others wait. same_call: whether exactly the calls blocked that the dumps show as unfinished, None if not replayed.
    finished: whether the repaired program finished, None if there was none. not_replayed: what the replay does not
    show. text: the result as a sentence."""

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
    """Run the program of the dumps as it is, and repaired. ended: ranks whose program has ended with status 0. python:
    an interpreter with torch, '' for this one. Raise RequestError if it has no torch."""
    try:
        program = Program(hang_verdict.search(dumps, ended))
        documents = [program.document(repaired=False)]
        if program.blamed:
            documents.append(program.document(repaired=True))
        return program.judge(run(documents, python or sys.executable))
    except NotReplayable as error:
        return Replay(f"not replayed: {error}")


class Program:
    """The calls of all ranks. Raise NotReplayable if there are too many, or none unfinished."""

    def __init__(self, search: hang_verdict.Search) -> None:
        self.search = search
        self.verdict = search.verdict()
        self.blamed = {one.rank: one.kind for one in self.verdict.culprits}
        self.causes = {rank: search.causes[rank] for rank in self.blamed}
        self.left: Counter[str] = Counter()
        self.near = self._near()
        self.states = self._states()
        self._limit()
        self.variants = {operation: found for operation in self.states if (found := self._variants(operation))}
        if self.near:  # what these wait for is not replayed
            self.states = {one: states for one, states in self.states.items() if not self._is_queued(one)}
        self.ranks = sorted({rank for states in self.states.values() for rank in states})
        self.waiting = {rank: self._waiting(rank) for rank in self.ranks}
        self.gates = {operation: self._gates(operation) for operation in self.states}

    def _near(self) -> frozenset[int]:
        """Return the ranks of the calls that the ranks at fault did not make, if there are too many ranks for one
        replay; else the empty set."""
        size = len(self.search.world)
        if size <= MOST_RANKS:
            return frozenset()
        near = frozenset().union(*(self.search.concerned(operation) for operation in self.causes.values()))
        if not 0 < len(near) <= MOST_RANKS:
            raise NotReplayable(f"{len(near) or size} ranks take part, and a replay has at most {MOST_RANKS}")
        self.left[f"the other {size - len(near)} ranks, and calls that wait for an older one"] = 1
        return near

    # Which rank has made which call

    def _states(self) -> dict[Operation, dict[int, str | None]]:
        found = {}
        complete = all(one.complete for one in self.search.ranks.values())
        operations = dict.fromkeys(one for rank in self.search.ranks.values() for one in rank.operations())
        joined = {operation[0] for operation in operations if self._lacks_a_member(operation)}
        for operation in operations:
            group, what = operation
            members = self.search.concerned(operation) | (self.blamed.keys() if group in joined else set())
            if what == CUT or (isinstance(what, Message) and (not self.search.is_listed(group) or len(members) < 2)):
                self.left["sends and receives between unknown ranks"] += 1
                continue
            if self.near and not self.near.issuperset(members):
                continue
            states = self._of_members(operation, members)
            recorded = all(one.call(operation) for rank, one in self.search.ranks.items() if rank in states)
            if _is_open(states) or (recorded and None not in states.values()) or (complete and isinstance(what, int)):
                found[operation] = states
            elif isinstance(what, int) or not complete:
                self.left["finished calls that the recorder of a rank has overwritten"] += 1
        if not any(map(_is_open, found.values())):
            raise NotReplayable("the dumps show no rank that waits in a call whose ranks they list")
        return found

    def _lacks_a_member(self, operation: Operation) -> bool:
        """Return whether all known members of a group wait, and no dump lists its members, as with gloo. Then a rank at
        fault may be one that has never called in this group."""
        if self.search.is_listed(operation[0]) or not isinstance(operation[1], int):
            return False
        states = self._of_members(operation, self.search.concerned(operation))
        return _is_open(states) and None not in states.values()

    def _of_members(self, operation: Operation, members: Collection[int]) -> dict[int, str | None]:
        """Return the state of the call on each member. A rank without a dump that is not at fault has called what the
        others did, and one at fault what the others finished."""
        states = {rank: self.search.state(rank, operation) for rank in members if rank in self.search.ranks}
        known = [states[rank] for rank in states if rank in self.search.members[operation[0]]]
        over = bool(known) and set(known) <= {DONE, FORGOTTEN}
        for rank in members:
            if rank not in self.search.ranks:
                states[rank] = DONE if over or rank not in self.blamed else None
            elif rank not in self.search.members[operation[0]]:
                states[rank] = DONE if over else None
        return {rank: DONE if state == FORGOTTEN else state for rank, state in states.items()}

    def _variants(self, operation: Operation) -> dict[int, int]:
        """Return which of different calls each rank made, 0 for the usual one; {} if all are equal, or finished."""
        states = self.states[operation]
        if not _is_open(states):
            return {}
        called = [rank for rank, state in states.items() if state is not None and rank in self.search.ranks]
        keys = self.search.keys(operation, called)
        votes = Counter(key for rank, key in keys.items() if rank not in self.blamed)
        order = [key for key, _ in (votes + Counter(keys.values())).most_common()]
        order.sort(key=lambda key: -votes[key])
        return {rank: order.index(key) for rank, key in keys.items()} if len(order) > 1 else {}

    def _limit(self) -> None:
        """Omit the oldest finished calls if there are too many. Raise NotReplayable if that does not suffice."""
        over = [one for one, states in self.states.items() if set(states.values()) == {DONE}]
        over.sort(key=lambda one: max(self._order(rank, one) for rank in self.states[one]))
        size = sum(map(len, self.states.values()))
        for operation in over:
            if size <= MOST_CALLS:
                break
            size -= len(self.states.pop(operation))
            self.left[f"older finished calls, because a replay makes at most {MOST_CALLS}"] += 1
        groups = len({group for group, _ in self.states})
        streams = len({(rank, *_stream(one)) for one, states in self.states.items() for rank in states})
        for number, most, what in (
            (sum(map(_is_open, self.states.values())), MOST_UNFINISHED, "unfinished calls"),
            (groups, MOST_GROUPS, "groups"),
            (streams, MOST_STREAMS, "streams of calls"),
        ):
            if number > most:
                raise NotReplayable(f"the dumps have {number} {what}, and a replay has at most {most}")

    # In which order

    def _order(self, rank: int, operation: Operation) -> tuple[int, int]:
        recording = self.search.ranks.get(rank)
        call = recording.call(operation) if recording else None
        what = operation[1]
        return call.order if call else -1, what.number if isinstance(what, Message) else what

    def _waiting(self, rank: int) -> list[Operation]:
        found = [operation for operation, states in self.states.items() if states.get(rank) in PENDING]
        return sorted(found, key=lambda operation: self._order(rank, operation))

    def _is_queued(self, operation: Operation) -> bool:
        """Return whether all ranks have made an unfinished call alike: it waits for an older one on a device."""
        states = self.states[operation]
        return _is_open(states) and None not in states.values() and operation not in self.variants

    def _gates(self, operation: Operation) -> dict[int, list[Operation]]:
        """Return the older unfinished calls of each rank after which its device executes this one. Sends and receives
        have separate streams, and count only if there is no other reason to wait."""
        if not self._is_queued(operation):
            return {}
        older: dict[int, list[Operation]] = {}
        for rank in (rank for rank, state in self.states[operation].items() if state in PENDING):
            own = self._order(rank, operation)[0]
            before = [one for one in self.waiting[rank] if self._order(rank, one)[0] < own]
            older[rank] = [one for one in _last_of_streams(before) if _stream(one) != _stream(operation)]
        collectives = {rank: [one for one in found if isinstance(one[1], int)] for rank, found in older.items()}
        return collectives if any(collectives.values()) else older

    def steps(self, rank: int, *, repaired: bool) -> list[Step]:
        """Return the calls of a rank, those of each stream in their order."""
        mine = [operation for operation, states in self.states.items() if rank in states]
        mine.sort(key=lambda operation: self._order(rank, operation))
        made = [operation for operation in mine if self.states[operation][rank] is not None]
        missing = [operation for operation in mine if self.states[operation][rank] is None]
        kind = self.blamed.get(rank, "")
        if kind == DEVICE_STUCK and not repaired:
            made = [operation for operation in made if self.states[operation][rank] == DONE]
        place = {operation: at for at, operation in enumerate(made)}
        found = []
        for operation in made:
            variant = self.variants.get(operation, {}).get(rank, 0)
            gates = tuple(place[one] for one in self.gates[operation].get(rank, ()) if one in place)
            found.append(Step(operation, 0 if kind and repaired else variant, gates))
        if not kind:
            after = _last_of_streams(one for one in self.waiting[rank] if not self._is_send(rank, one))
            found += [Step(operation, 0, tuple(place[one] for one in after)) for operation in missing]
        elif repaired:
            found += [Step(operation, 0, ()) for operation in missing]
        return found

    def _is_send(self, rank: int, operation: Operation) -> bool:
        """A program continues after a send, whether or not it is received."""
        group, what = operation
        return isinstance(what, Message) and self.search.orders[group][what.src] == rank

    def document(self, *, repaired: bool) -> dict[str, Any]:
        """Return the program for jobs/replay.py."""
        at = {rank: place for place, rank in enumerate(self.ranks)}
        members: dict[Any, list[int]] = {}
        for operation, states in self.states.items():
            ranks = list(dict.fromkeys(rank for rank in self.search.orders[operation[0]] if rank in at))
            ranks += sorted(states.keys() - set(ranks))
            for variant in {0, *self.variants.get(operation, {}).values()}:
                members.setdefault((operation[0], variant * isinstance(operation[1], int)), ranks)
        numbers = {group: number for number, group in enumerate(members)}
        tags: dict[Any, int] = {}
        steps = []
        for rank in self.ranks:
            streams: dict[Any, int] = {}
            found = []
            for operation, variant, after in self.steps(rank, repaired=repaired):
                group, what = operation
                stream = streams.setdefault(_stream(operation), len(streams))
                if isinstance(what, int):
                    found.append([stream, numbers[group, variant], "all", 0, 0, after])
                    continue
                tag = tags.setdefault((operation, variant), len(tags))
                order, inside = self.search.orders[group], members[group, 0]
                send = order[what.src] == rank
                peer = inside.index(order[what.dst if send else what.src])
                found.append([stream, numbers[group, 0], "send" if send else "recv", peer, tag, after])
            steps.append(found)
        groups = [[at[rank] for rank in ranks] for ranks in members.values()]
        return {"groups": groups, "steps": steps}

    # What it shows

    def judge(self, results: Sequence[Mapping[str, Any]]) -> Replay:
        """Return what the results of jobs/replay.py show: of the program as it is, and of the repaired one."""
        failed = next((one for one in results if one["error"] or not one["settled"]), None)
        if failed:
            raise NotReplayable(failed["error"] or "a rank of the replay has ended")
        calls = sum(len(self.steps(rank, repaired=False)) for rank in self.ranks)
        size = (len(self.ranks), len({group for group, _ in self.states}), calls)
        base = Replay("", *size, not_replayed=tuple(self._not_replayed()))
        done = set(self._finished(results[0]))
        waits = [(rank, one) for one, states in self.states.items() for rank in states if states[rank] in PENDING]
        over = [(rank, one) for one, states in self.states.items() for rank in states if set(states.values()) == {DONE}]
        continued = [one for one in waits if one in done]
        stopped = [one for one in over if one not in done]
        what = f"replayed: {', '.join(map(counted, size, ('rank', 'group', 'call')))}"
        if not self.blamed and continued:
            raise NotReplayable(
                "all ranks have made the calls that do not finish, so a device or a link does not advance. With gloo "
                "they finish"
            )
        if continued or stopped:
            shown = [f"rank {rank} finishes {self.search.called(one)} here" for rank, one in continued[:SHOWN]]
            shown += [f"rank {rank} waits in {self.search.called(one)} here" for rank, one in stopped[:SHOWN]]
            reasons = ["the verdict is not confirmed"]
            if any(self._is_queued(one) and not any(self.gates[one].values()) for _, one in continued):
                reasons.append("a device or a link does not advance, since all ranks have made that call")
            if not all(one.complete for one in self.search.ranks.values()):
                reasons.append("a recorder has overwritten the call that explains it")
            text = f"{what}; it does not block at the same calls ({'; '.join(shown)}): {', or '.join(reasons)}"
            return replace(base, text=text, same_call=False)
        blocked = tuple(self._blocked_at())
        what += "; blocked at the same call" + ": " * bool(blocked) + "; ".join(blocked)
        if len(results) < 2:
            text = f"{what}; the verdict names no rank whose call could be repaired"
            return replace(base, text=text, blocked_at=blocked, same_call=True)
        finished = all(set(states) <= {FINISHED} for states in results[1]["states"])
        end = "it finished" if finished else "it did not finish, so there is another cause"
        text = f"{what}; with {' and '.join(self._repairs())}, {end}"
        return replace(base, text=text, blocked_at=blocked, same_call=True, finished=finished)

    def _finished(self, result: Mapping[str, Any]) -> Iterator[tuple[int, Operation]]:
        for rank, states in zip(self.ranks, result["states"], strict=True):
            for step, state in zip(self.steps(rank, repaired=False), states, strict=True):
                if state == FINISHED:
                    yield rank, step.operation

    def _blocked_at(self) -> Iterator[str]:
        for operation in dict.fromkeys(one for one in self.causes.values() if one in self.states):
            ranks = sorted(rank for rank, other in self.causes.items() if other == operation)
            waiting = sorted(rank for rank, state in self.states[operation].items() if state in PENDING)
            waiting = [rank for rank in waiting if rank not in ranks]
            plural = len(ranks) > 1
            why = {
                NOT_CALLED: "never called",
                MISMATCH: "made other calls" if plural else "made another call",
                DEVICE_STUCK: "do not finish it" if plural else "does not finish it",
            }.get(self.blamed[ranks[0]], "left no dump")
            wait = f"{rank_names(waiting)} wait{'s' * (len(waiting) == 1)}, " if waiting else ""
            yield f"{self.search.called(operation)} ({wait}{rank_names(ranks)} {why})"

    def _repairs(self) -> Iterator[str]:
        for kind in dict.fromkeys(self.blamed.values()):
            ranks = sorted(rank for rank, other in self.blamed.items() if other == kind)
            text = {MISMATCH: "made as the others make them", DEVICE_STUCK: "executed"}.get(kind, "added")
            yield f"the calls of {rank_names(ranks)} {text}"

    def _not_replayed(self) -> Iterator[str]:
        if stuck := sorted(rank for rank, kind in self.blamed.items() if kind == DEVICE_STUCK):
            yield f"a device that does not advance: {rank_names(stuck)} made no unfinished call in the first run"
        yield from (f"{number} {what}" if number > 1 else what for what, number in self.left.items())
        if missing := sorted(set(self.ranks) - self.search.ranks.keys() - self.blamed.keys()):
            yield f"where {rank_names(missing)} waited: a rank without a dump made the calls that the others list"
        kinds = {self.search.name(one).partition(" ")[0] for one in self.states if isinstance(one[1], int)}
        if kinds := kinds - {"all_reduce"}:
            yield f"{', '.join(sorted(kinds)[:SHOWN])}: all_reduce takes their place, so that all ranks wait"


def _is_open(states: Mapping[int, str | None]) -> bool:
    return any(state in PENDING for state in states.values())


def _last_of_streams(operations: Iterable[Operation]) -> list[Operation]:
    return list({_stream(operation): operation for operation in operations}.values())


def _stream(operation: Operation) -> tuple[Any, ...]:
    group, what = operation
    return (group, what.src, what.dst) if isinstance(what, Message) else (group,)


def run(programs: Sequence[Mapping[str, Any]], python: str, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """Run the programs one after another with jobs/replay.py, and leave no process behind."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with tempfile.TemporaryDirectory(prefix="hpcinit-replay-", ignore_cleanup_errors=True) as folder:
        command = [python, str(CHILD), str(os.getpid())]
        lines = "".join(f"{json.dumps(program)}\n" for program in programs)
        try:
            process = subprocess.Popen(command, cwd=folder, env=env, text=True, start_new_session=True, **pipes)
        except OSError as error:
            raise RequestError(_no_torch(python, error.strerror or str(error))) from None
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
        raise RequestError(_no_torch(python, results[0]["no_torch"]))
    if len(results) < len(programs):
        last = err.strip().rpartition("\n")[2]
        raise NotReplayable(f"the replay ended with exit status {process.returncode}: {last}")
    return results


def _no_torch(python: str, why: str) -> str:
    return (
        f"--replay cannot use {python} ({why}): expected a Python with torch, because the replay is a program of gloo; "
        "add --python /path/of/the/environment/of/the/job/bin/python"
    )
