"""Builds the programs for a replay: for each rank, the calls that its dump lists, unchanged and repaired.

The program has the process groups of the dumps. Every collective becomes an all_reduce of one number, because with gloo
the root of a broadcast or a scatter does not wait for the others. If ranks make different calls, NCCL waits, but gloo
raises an error. So a different call is made in a copy of the group, where no other rank makes a call.

A dump ends with the calls in which its rank waits. In the replay, a rank that is not at fault also makes the later
calls in which others wait for it. A rank at fault makes these calls only in the repaired program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from hpcinit.why.flight_recorder import CUT, DONE, FORGOTTEN, SCHEDULED, STARTED, Message, Operation
from hpcinit.why.hang_verdict import DEVICE_STUCK, Search

MOST_RANKS = 64
MOST_CALLS = 20_000  # of all ranks together; 3,000 take a second
MOST_UNFINISHED = 2_000
MOST_RECORDED = 1_000_000
MOST_STREAMS = 4_000  # threads of all ranks together, without those of gloo
PENDING = (SCHEDULED, STARTED)


class Step(NamedTuple):
    """A call that one rank makes in the replay.

    variant: 0 for the usual call, or another number if the ranks made different calls.
    after: the indices of the rank's steps that must finish before this one.
    """

    operation: Operation
    variant: int
    after: tuple[int, ...]


class NotReplayable(ValueError):
    """The dumps cannot be replayed. The text of the error is the reason."""


class Program:
    """The calls of all ranks in a replay.

    Raise NotReplayable if there are too many ranks or calls, or if all calls are finished.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.verdict = search.verdict()
        self.blamed = {one.rank: one.kind for one in self.verdict.culprits}
        self.causes = {rank: search.causes[rank] for rank in self.blamed}
        self.left: Counter[str] = Counter()
        self.near = self._near()
        self.states = self._states()
        self._limit()
        self.variants = {operation: found for operation in self.states if (found := self._variants(operation))}
        if self.near:  # queued calls wait for calls that are not replayed
            self.states = {one: states for one, states in self.states.items() if not self.is_queued(one)}
        self.ranks = sorted({rank for states in self.states.values() for rank in states})
        self.waiting = {rank: self._waiting(rank) for rank in self.ranks}
        self.gates = {operation: self._gates(operation) for operation in self.states}

    def _near(self) -> frozenset[int]:
        """If there are too many ranks for a replay, return those in the calls in which others wait for a rank at fault.

        Return an empty set if all ranks fit into the replay.
        """
        size = len(self.search.world)
        if size <= MOST_RANKS:
            return frozenset()
        near = frozenset().union(*(self.search.concerned(operation) for operation in self.causes.values()))
        if not 0 < len(near) <= MOST_RANKS:
            raise NotReplayable(f"{len(near) or size} ranks are involved, but a replay can have at most {MOST_RANKS}")
        self.left[f"the other {size - len(near)} ranks, and calls that wait for an older one"] = 1
        return near

    # Which rank has made which call

    def _states(self) -> dict[Operation, dict[int, str | None]]:
        found = {}
        complete = all(one.complete for one in self.search.ranks.values())
        operations = dict.fromkeys(one for rank in self.search.ranks.values() for one in rank.operations())
        if self.near:
            operations = {one: None for one in operations if self.near.issuperset(self.search.concerned(one))}
        if (size := sum(len(self.search.concerned(one)) for one in operations)) > MOST_RECORDED:
            raise NotReplayable(f"the dumps contain {size} calls, but a replay reads at most {MOST_RECORDED}")
        for operation in operations:
            group, what = operation
            members = self.search.concerned(operation)
            if what == CUT or (isinstance(what, Message) and (not self.search.is_listed(group) or len(members) < 2)):
                self.left["sends and receives between unknown ranks"] += 1
                continue
            states = self._of_members(operation, members)
            recorded = all(one.call(operation) for rank, one in self.search.ranks.items() if rank in states)
            if is_open(states) or (recorded and None not in states.values()) or (complete and isinstance(what, int)):
                found[operation] = states
            elif isinstance(what, int) or not complete:
                self.left["finished calls that the recorder of a rank has overwritten"] += 1
        if not any(map(is_open, found.values())):
            raise NotReplayable("the dumps do not list the ranks of any unfinished call")
        return found

    def _of_members(self, operation: Operation, members: Collection[int]) -> dict[int, str | None]:
        """Return each member's state of a call, or None for a member that has not made the call.

        A member without a dump counts as done, unless it is at fault and others have not finished the call.
        """
        states = {rank: self.search.state(rank, operation) for rank in members if rank in self.search.ranks}
        over = bool(states) and set(states.values()) <= {DONE, FORGOTTEN}
        for rank in members:
            if rank not in self.search.ranks:
                states[rank] = DONE if over or rank not in self.blamed else None
        return {rank: DONE if state == FORGOTTEN else state for rank, state in states.items()}

    def _variants(self, operation: Operation) -> dict[int, int]:
        """Return, as a number, which of several different calls each rank made. 0 is the usual call.

        Return {} if all ranks made the same call, or if the operation has finished.
        """
        states = self.states[operation]
        if not is_open(states):
            return {}
        called = [rank for rank, state in states.items() if state is not None and rank in self.search.ranks]
        keys = self.search.keys(operation, called)
        votes = Counter(key for rank, key in keys.items() if rank not in self.blamed)
        order = sorted(dict(Counter(keys.values()).most_common()), key=lambda key: -votes[key])
        return {rank: order.index(key) for rank, key in keys.items()} if len(order) > 1 else {}

    def _limit(self) -> None:
        """Omit the oldest finished calls if there are too many. Raise NotReplayable if that is not enough."""
        over = [one for one, states in self.states.items() if set(states.values()) == {DONE}]
        over.sort(key=lambda one: max(self._order(rank, one) for rank in self.states[one]))
        size = sum(map(len, self.states.values()))
        for operation in over:
            if size <= MOST_CALLS:
                break
            size -= len(self.states.pop(operation))
            self.left[f"older finished calls, because a replay makes at most {MOST_CALLS}"] += 1
        streams = len({(rank, *_stream(one)) for one, states in self.states.items() for rank in states})
        for number, most, what in (
            (sum(map(is_open, self.states.values())), MOST_UNFINISHED, "unfinished calls"),
            (size, MOST_CALLS, "calls that are not finished on all ranks"),
            (streams, MOST_STREAMS, "streams of calls"),
        ):
            if number > most:
                raise NotReplayable(f"the dumps contain {number} {what}, but a replay can have at most {most}")

    # In which order

    def _order(self, rank: int, operation: Operation) -> tuple[int, int]:
        recording = self.search.ranks.get(rank)
        call = recording.call(operation) if recording else None
        what = operation[1]
        return call.order if call else -1, what.number if isinstance(what, Message) else what

    def _waiting(self, rank: int) -> list[Operation]:
        found = [operation for operation, states in self.states.items() if states.get(rank) in PENDING]
        return sorted(found, key=lambda operation: self._order(rank, operation))

    def is_queued(self, operation: Operation) -> bool:
        """Return whether all ranks made the same call, so it only waits for an older unfinished call on a device."""
        states = self.states[operation]
        return is_open(states) and None not in states.values() and operation not in self.variants

    def _gates(self, operation: Operation) -> dict[int, list[Operation]]:
        """Return, for each rank, the older unfinished calls for which this call waits on the rank's device.

        Sends and receives have separate streams. They count only if no rank has an older unfinished collective.
        """
        if not self.is_queued(operation):
            return {}
        older: dict[int, list[Operation]] = {}
        for rank in (rank for rank, state in self.states[operation].items() if state in PENDING):
            own = self._order(rank, operation)[0]
            before = [one for one in self.waiting[rank] if self._order(rank, one)[0] < own]
            older[rank] = [one for one in _last_of_streams(before) if _stream(one) != _stream(operation)]
        collectives = {rank: [one for one in found if isinstance(one[1], int)] for rank, found in older.items()}
        return collectives if any(collectives.values()) else older

    def steps(self, rank: int, *, repaired: bool) -> list[Step]:
        """Return the calls of a rank. The calls on each stream are in order."""
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
            # A program continues after a send, even if the peer does not receive the message.
            after = _last_of_streams(one for one in self.waiting[rank] if self._role(rank, one) != "send")
            found += [Step(operation, 0, tuple(place[one] for one in after)) for operation in missing]
        elif repaired:
            found += [Step(operation, 0, ()) for operation in missing]
        return found

    def _role(self, rank: int, operation: Operation) -> str:
        group, what = operation
        if isinstance(what, int):
            return "allreduce"
        return "send" if self.search.orders[group][what.src] == rank else "recv"

    def document(self, *, repaired: bool) -> dict[str, Any]:
        """Return the program in the form that jobs/replay_ranks.py reads."""
        at = {rank: place for place, rank in enumerate(self.ranks)}
        members: dict[Any, list[int]] = {}  # of each group, and of its copies for different calls
        for operation, states in self.states.items():
            ranks = list(dict.fromkeys(rank for rank in self.search.orders[operation[0]] if rank in at))
            ranks += sorted(states.keys() - set(ranks))
            for variant in {0, *self.variants.get(operation, {}).values()}:
                members.setdefault((operation[0], variant * isinstance(operation[1], int)), ranks)
        numbers = {group: number for number, group in enumerate(members)}
        tags: dict[Any, int] = {}
        steps: list[list[list[Any]]] = []
        for rank in self.ranks:
            streams: dict[Any, int] = {}
            steps.append([])
            for operation, variant, after in self.steps(rank, repaired=repaired):
                group, what = operation
                role, order, tag, peer = self._role(rank, operation), self.search.orders[group], 0, 0
                if isinstance(what, Message):
                    tag = tags.setdefault((operation, variant), len(tags))
                    peer = members[group, 0].index(order[what.dst if role == "send" else what.src])
                stream = streams.setdefault(_stream(operation), len(streams))
                number = numbers[group, variant * (role == "allreduce")]
                steps[-1].append([stream, number, role, peer, tag, after])
        groups = [[at[rank] for rank in ranks] for ranks in members.values()]
        return {"groups": groups, "steps": steps}


def is_open(states: Mapping[int, str | None]) -> bool:
    return any(state in PENDING for state in states.values())


def _last_of_streams(operations: Iterable[Operation]) -> list[Operation]:
    return list({_stream(operation): operation for operation in operations}.values())


def _stream(operation: Operation) -> tuple[Any, ...]:
    group, what = operation
    return (group, what.src, what.dst) if isinstance(what, Message) else (group,)
