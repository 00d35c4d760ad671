"""Simulated training runs that hang, and the dumps that torch's flight recorder would write for them.

The form of a dump is that of torch 2.13 (tests/data/flight has recorded ones). The simulation shares no code with the
code under test: ranks call operations in one global order, devices execute them, and one or two ranks stop at a random point.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

NOT_CALLED, DEVICE_STUCK, NO_DUMP = "not-called", "device-stuck", "no-dump"
MISMATCH, PEER_LOST = "mismatch", "peer-lost"
SILENT = (NO_DUMP, PEER_LOST)
CREATED_NS = 1795338319044102866
BATCH = "a batch"  # two collectives in _coalescing_manager: the parts keep their first state, an entry at the end has the true one
SYMMETRIC = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "all_to_all", "all_reduce_barrier", BATCH)


@dataclass(frozen=True)
class Op:
    """kind: of SYMMETRIC, 'broadcast', 'send' (first to second member) or 'exchange' (a batch of both directions)."""

    group: int
    kind: str
    members: tuple[int, ...]  # global ranks; the root of a broadcast is the first
    size: int
    eager: bool  # a sender or root finishes without its peers
    early: bool = (
        False  # a send that its rank makes earlier than the others' programs would show, and does not wait for
    )


@dataclass
class Fault:
    rank: int
    kind: str
    at: int  # index in the rank's program
    in_the_middle: bool = False  # the device has started the call and never finishes it


@dataclass
class Training:
    """One simulated training. lead: how many unfinished calls a rank's program may have before it waits."""

    rng: random.Random
    lead: int
    streams: bool  # each group has its own stream on the device, else one for all
    groups: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    programs: dict[int, list[Op]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    called: dict[int, int] = field(default_factory=dict)
    state: dict[tuple[int, int], str] = field(default_factory=dict)  # (rank, place) -> scheduled, started, completed

    def place(self, rank: int, op: Op) -> int:
        return self.index[rank][id(op)]

    def fault(self, rank: int) -> Fault | None:
        return next((fault for fault in self.faults if fault.rank == rank), None)

    def pending(self, rank: int) -> list[int]:
        return [at for at in range(self.called[rank]) if self.state[rank, at] != "completed"]

    def run(self) -> None:
        """Run to the end, or until no rank can continue."""
        self.called, self.state = dict.fromkeys(self.programs, 0), {}
        self.index = {rank: {id(op): at for at, op in enumerate(ops)} for rank, ops in self.programs.items()}
        ranks = list(self.programs)
        moved = True
        while moved:
            self.rng.shuffle(ranks)
            moved = sum(self._call(rank) + self._execute(rank) for rank in ranks) > 0

    def waits_for_a_send(self, fault: Fault) -> bool:
        """Return whether a stuck device has an older unfinished send, or started one that its peer has not called. The
        dumps do not show whether it is stuck or waits for that peer."""
        if fault.kind != DEVICE_STUCK:
            return False
        op = self.programs[fault.rank][fault.at]
        alone = op.early and any((one, self.place(one, op)) not in self.state for one in op.members)
        own = alone and self.state.get((fault.rank, fault.at)) == "started"
        return own or any(at < fault.at for at in self.pending(fault.rank))

    def ends(self) -> bool:
        """Return whether the training run ends without a fault."""
        self.run()
        return all(self.called[rank] == len(self.programs[rank]) and not self.pending(rank) for rank in self.programs)

    def _call(self, rank: int) -> bool:
        at, fault = self.called[rank], self.fault(rank)
        program = self.programs[rank]
        unfinished = [one for one in self.pending(rank) if not (program[one].early and program[one].members[0] == rank)]
        if at == len(program) or len(unfinished) >= self.lead:
            return False
        if fault and fault.kind in (NOT_CALLED, *SILENT) and fault.at == at:
            return False
        self.state[rank, at] = "scheduled"
        self.called[rank] += 1
        return True

    def _execute(self, rank: int) -> bool:
        moved, busy, fault = False, set(), self.fault(rank)
        stuck = fault if fault and fault.kind == DEVICE_STUCK else None
        for at in self.pending(rank):
            op = self.programs[rank][at]
            stream: object = op.group if self.streams else 0
            if self.streams and op.kind == "send":  # each pair has its own communicator
                stream = (op.group, op.members)
            if stream in busy:
                continue
            busy.add(stream)
            if stuck and at >= stuck.at and not (stuck.in_the_middle and at == stuck.at):
                continue
            if self.state[rank, at] == "scheduled":
                self.state[rank, at] = "started"
                moved = True
            if self._can_finish(rank, op) and not (stuck and at == stuck.at):
                self.state[rank, at] = "completed"
                moved = True
        return moved

    def _can_finish(self, rank: int, op: Op) -> bool:
        def reached(other: int) -> bool:
            return self.state.get((other, self.place(other, op))) in ("started", "completed")

        if any(fault.kind == MISMATCH and self.programs[fault.rank][fault.at] is op for fault in self.faults):
            return False
        first = op.members[0]
        if op.kind in ("send", "broadcast"):
            return (op.eager or all(map(reached, op.members))) if rank == first else reached(first)
        return all(map(reached, op.members))


KINDS: Sequence[str] = (*SYMMETRIC, *SYMMETRIC, "broadcast", "send", "send", "exchange")


def training(
    seed: int, *, faults: int = 1, kinds: Sequence[str] = (NOT_CALLED, DEVICE_STUCK), calls: Sequence[str] = KINDS,
    leads: Sequence[int] = (1, 1, 2, 4, 1000), after_a_send: bool = False,
) -> Training:  # fmt: skip
    """A random layout (data, tensor, pipeline and expert groups), program and faults, simulated until it hangs.

    after_a_send: a stuck device also has an unfinished send.
    """
    rng = random.Random(seed)
    while True:
        found = Training(rng, lead=rng.choice(leads), streams=rng.random() < 0.3)
        found.groups = list(_groups(rng))
        world = found.groups[0][1]
        found.programs = {rank: [] for rank in world}
        for _ in range(rng.randint(20, 80)):
            op = _op(rng, found.groups, calls, early=found.streams)
            for rank in op.members:
                found.programs[rank].append(op)
                if op.early and rank == op.members[0]:
                    _move_forward(rng, found.programs[rank])
        if not found.ends():
            continue
        able = [rank for rank in world if found.programs[rank]]
        if len(able) < faults:
            continue
        ranks = rng.sample(able, faults)
        found.faults = [
            Fault(rank, rng.choice(kinds), rng.randrange(len(found.programs[rank])), rng.random() < 0.5)
            for rank in ranks
        ]
        if any(
            fault.kind == MISMATCH and not _can_differ(found.programs[fault.rank][fault.at]) for fault in found.faults
        ):
            continue
        found.run()
        hangs = any(found.pending(rank) for rank in world)
        if hangs and any(map(found.waits_for_a_send, found.faults)) == after_a_send:
            return found


def _groups(rng: random.Random) -> Iterator[tuple[str, tuple[int, ...]]]:
    dp, tp, pp = rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((1, 2, 3))
    if dp * tp * pp == 1:
        dp = 2
    grid = {place: at for at, place in enumerate(itertools.product(range(pp), range(dp), range(tp)))}
    yield "default_pg", tuple(range(len(grid)))
    for name, axis in (("pp", 0), ("dp", 1), ("tp", 2)):
        lines: dict[tuple[int, ...], list[int]] = {}
        for place, rank in grid.items():
            lines.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
        for members in lines.values():
            if len(members) > 1:
                yield name, tuple(members)
            if len(members) > 1 and rng.random() < 0.2:  # a second group of the same ranks, in another order
                yield f"{name}_again", tuple(rng.sample(members, len(members)))
    if rng.random() < 0.3:
        yield "alone", (rng.randrange(len(grid)),)
    if dp * tp > 2:  # experts: halves of a stage
        for stage in range(pp):
            ranks = [rank for place, rank in grid.items() if place[0] == stage]
            yield "ep", tuple(ranks[::2])
            yield "ep", tuple(ranks[1::2])


def _move_forward(rng: random.Random, program: list[Op]) -> None:
    """Let the sender call its last send before some of its other calls, but after its other messages."""
    op = program.pop()
    at = len(program)
    while at and rng.random() < 0.7 and program[at - 1].kind not in ("send", "exchange"):
        at -= 1
    program.insert(at, op)


def _can_differ(op: Op) -> bool:
    return op.kind in SYMMETRIC and len(op.members) > 2


def _op(
    rng: random.Random, groups: Sequence[tuple[str, tuple[int, ...]]], calls: Sequence[str], *, early: bool = False
) -> Op:
    group = rng.randrange(len(groups))
    members, kind = groups[group][1], rng.choice(calls)
    if len(members) < 2 and kind not in SYMMETRIC:
        return _op(rng, groups, calls, early=early)
    if kind in ("send", "exchange"):
        members = tuple(rng.sample(members, 2))
    elif kind == "broadcast":
        members = tuple(rng.sample(members, len(members)))
    early = early and kind == "send" and rng.random() < 0.5
    return Op(group, kind, members, rng.randint(1, 1000), eager=rng.random() < 0.5, early=early)


def expected(found: Training, *, timed: bool) -> set[tuple[int, str]]:
    """Return the faults that the dumps prove: (rank, kind)."""
    certain = set()
    for fault in found.faults:
        rank, at = fault.rank, fault.at
        ops = found.programs[rank]
        if fault.kind == DEVICE_STUCK:
            pending = found.pending(rank)
            if found.called[rank] <= at or not pending or pending[0] != at:
                continue  # the fault was not reached
            others = [found.state.get((one, found.place(one, ops[at]))) for one in ops[at].members if one != rank]
            seen = ("started", "completed") if timed and not fault.in_the_middle else ("completed",)
            one_way = ops[at].kind in ("send", "broadcast")
            # A rank that has started a broadcast may wait for another one that should pass the data on.
            waits = fault.in_the_middle and any(state != "completed" for state in others)
            if any(state in seen for state in others) and not (one_way and (None in others or not timed or waits)):
                certain.add((rank, fault.kind))
        else:
            missing = ops[found.called[rank] :]
            if _shows(found, rank, missing if fault.kind == NOT_CALLED else ops) and (
                fault.kind in SILENT or (found.called[rank] == at and not found.pending(rank))
            ):
                certain.add((rank, fault.kind))
    return certain


def _shows(found: Training, rank: int, missing: list[Op]) -> bool:
    """Whether another rank with a dump waits in one of `missing`, as the oldest of its calls in that group."""
    silent = {fault.rank for fault in found.faults if fault.kind in SILENT}
    for other in found.programs.keys() - silent:
        seen: set[tuple[Any, ...]] = set()
        for at in found.pending(other):
            op = found.programs[other][at]
            channel = (op.group, op.kind in ("send", "exchange") and op.members)
            if channel not in seen and other != rank and any(op is one for one in missing):
                return True
            seen.add(channel)
    return False


def dumps(found: Training, *, timed: bool = True, size: int = 2000, gloo: bool = False) -> dict[int, dict[str, Any]]:
    """The dumps of all ranks that leave one. timed: the recorder sees a call start. size: how many calls it keeps.

    gloo: as gloo's recorder does it, without states, sends, receives and members of groups.
    """
    silent = {fault.rank for fault in found.faults if fault.kind in SILENT}
    return {rank: _dump(found, rank, timed, size, gloo) for rank in found.programs if rank not in silent}


def _dump(found: Training, rank: int, timed: bool, size: int, gloo: bool) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    numbers: dict[tuple[int, bool], int] = {}
    mine = [group for group, (_, members) in enumerate(found.groups) if rank in members]
    for at in range(found.called[rank]):
        op = found.programs[rank][at]
        p2p = op.kind in ("send", "exchange")
        if gloo and p2p:
            continue
        numbers[op.group, p2p] = numbers.get((op.group, p2p), 0) + 1
        true = found.state[rank, at]
        state = "scheduled" if gloo or (true == "started" and not timed) else true
        lost = any(fault.kind == PEER_LOST and fault.rank in op.members for fault in found.faults)
        differs = any(fault == Fault(rank, MISMATCH, at, fault.in_the_middle) for fault in found.faults)
        names = (
            ["reduce"] if differs else ["allreduce_coalesced"] if gloo and op.kind == BATCH else _names(found, rank, op)
        )
        for name in names:
            part = len(names) > 1 and name != names[-1]  # only the end of a batch changes its state
            sizes = [[op.size]] if part or len(names) == 1 else []
            entries.append(
                {
                    "record_id": len(entries),
                    "pg_id": mine.index(op.group),
                    "process_group": (str(op.group), found.groups[op.group][0]),
                    "collective_seq_id": numbers.get((op.group, False), 0),
                    "p2p_seq_id": numbers.get((op.group, True), 0),
                    "profiling_name": f"{'gloo' if gloo else 'nccl'}:{name}",
                    "time_created_ns": CREATED_NS + 1000 * at,
                    "timeout_ms": 600_000,
                    "input_sizes": [[found.rng.randint(1, 9)]] if op.kind == "all_to_all" else sizes,
                    "output_sizes": sizes,
                    "input_dtypes": ["Float"] * len(sizes),
                    "output_dtypes": ["Float"] * len(sizes),
                    "state": "scheduled" if part else state,
                    "time_discovered_started_ns": 1 if timed and state != "scheduled" and not part else None,
                    "retired": (true == "completed" or lost) and not part,
                    "is_p2p": p2p and name != "coalesced",  # as torch marks the end
                }
            )
    used = {group for group, _ in numbers}  # NCCL lists a group at its first call
    config = {
        str(group): {"name": str(group), "desc": found.groups[group][0], "ranks": str(list(found.groups[group][1]))}
        for group in mine
        if group in used
    }
    status = {
        str(at): {"last_enqueued_collective": numbers.get((group, False), -1)}
        for at, group in enumerate(mine)
        if group in used
    }
    listed = {"": {"name": "", "desc": "", "ranks": "[]"}} if gloo else config
    document = {"version": "2.10", "pg_config": listed, "pg_status": status, "entries": entries[-size:]}
    return {**document, "written_ns": CREATED_NS + 60 * 10**9}


def _names(found: Training, rank: int, op: Op) -> list[str]:
    """The entries of one call; a send names ranks of the group."""
    if op.kind == BATCH:
        return ["_all_gather_base", "_all_gather_base", "ALLGATHER_coalesced"]
    if op.kind not in ("send", "exchange"):
        return [op.kind]
    members = found.groups[op.group][1]
    first, second = (members.index(one) for one in op.members[:2])
    if op.kind == "send":
        return [f"send {first}->{second}" if rank == op.members[0] else f"recv {second}<-{first}"]
    own, other = (first, second) if rank == op.members[0] else (second, first)
    return [f"send {own}->{other}", f"recv {own}<-{other}", "coalesced"]
