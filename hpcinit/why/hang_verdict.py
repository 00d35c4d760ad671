"""Finds the ranks that cause a hang, from the flight recorder's dumps of all ranks.

In an unfinished call, a rank waits for the other members of the group. A member may not have made the call, its device
may be stuck, or it may have left no dump. If a member waits in a call of another group, it is only a victim, and the
search continues with that call. The ranks that remain are the root causes.

A device executes the calls of a rank in order. An NCCL kernel starts even if other ranks have not made the call. So a
device or link is stuck if the oldest unfinished call of a rank has not started, or if the other ranks have finished it.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from hpcinit.base import failure_kinds
from hpcinit.base.text import counted, ranges
from hpcinit.why import flight_recorder
from hpcinit.why.flight_recorder import (
    CUT,
    DONE,
    FORGOTTEN,
    SCHEDULED,
    STARTED,
    UNREADABLE,
    Call,
    Group,
    Message,
    Operation,
    Recording,
)

NOT_CALLED, DEVICE_STUCK, MISMATCH = "not-called", "device-stuck", "mismatch"
NO_DUMP, PEER_LOST = "no-dump", "peer-lost"
UNPROVEN = (NO_DUMP, PEER_LOST)
CLOCKS_NS = 10 * 10**9  # the clocks of two nodes may differ by up to this time
DEFAULT = "default_pg"  # torch's description of the group of all ranks

# In all_to_all and in the variants with 'v', sizes may differ between ranks. Only rank `root` has the input of a
# scatter and the output of a gather.
UNEVEN = ("all_to_all", "alltoall")
NO_INPUT, NO_OUTPUT = ("scatter",), ("gather",)
ONE_WAY = ("broadcast", "reduce_oop", "gather", "scatter", "send", "recv")
ANY_INPUT_TYPE = ("scatter", "broadcast")  # ranks that only receive may pass an input of another type

ONLY_UNFINISHED = (
    "which rank the others wait for: the dumps list only unfinished calls, so a call that they omit may have finished; "
    "run again without TORCH_INCLUDE_ONLY_ACTIVE"
)
ADVICE = {
    NOT_CALLED: "that rank's stack shows where its program is: hpcinit logs --rank {rank}, or while the job runs "
    "hpcinit stacks RUN --rank {rank}",
    DEVICE_STUCK: "look for Xid and link errors on its node, and exclude the node: +cluster.sbatch.exclude=NODE",
    MISMATCH: "the ranks run different code or data at this point: compare what they do before this call",
    NO_DUMP: "its process may be dead or unresponsive: read its log, and check its node",
    PEER_LOST: "its process or its node has died: read its log, and check its node",
}


@dataclass(frozen=True)
class Culprit:
    """A rank that causes a hang.

    kind: 'not-called', 'device-stuck', 'mismatch', 'no-dump' or 'peer-lost'.
    group, description, collective, number: the call in which the other ranks wait. `group` is torch's name of the
        group. number is None for a send or receive.
    waiting_ranks: the ranks that wait in this call.
    since_ns: when the first of them made the call, in nanoseconds since 1970, or 0 if no dump shows it.
    shared: the evidence for a sentence about several ranks, such as 'have not called ...'.
    """

    rank: int
    host: str
    kind: str
    group: str
    description: str
    collective: str
    number: int | None
    waiting_ranks: tuple[int, ...]
    evidence: str
    since_ns: int = 0
    shared: str = ""

    @property
    def advice(self) -> str:
        return ADVICE[self.kind].format(rank=self.rank)


@dataclass(frozen=True)
class HangVerdict:
    """Which ranks cause a hang, and which ranks only wait.

    culprits: the root causes: proven ones before others, and earlier ones before later ones.
    victims: the ranks that wait because of them.
    unknown: questions that the dumps do not answer, each with a hint on what would answer it.
    differ: whether ranks made different calls, and the dumps do not show which call is wrong.
    shown: whether the dumps show a hang. False if `unknown` only reports unreadable dumps.
    """

    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()
    differ: bool = False
    shown: bool = True

    def __bool__(self) -> bool:
        return self.shown and bool(self.culprits or self.unknown)

    @property
    def kind(self) -> str:
        """Return the kind of the failure, one of base/failure_kinds.py."""
        mismatch = self.culprits[0].kind == MISMATCH if self.culprits else self.differ
        return failure_kinds.MISMATCH if mismatch else failure_kinds.HANG

    def lines(self) -> tuple[str, ...]:
        """Return one sentence per root cause, and then what is unknown. Ranks with the same cause share a sentence."""
        shared: dict[tuple[str, str], list[Culprit]] = {}
        for one in self.culprits:
            shared.setdefault((one.kind, one.shared or one.evidence), []).append(one)
        sentences = [_joined(found) for found in shared.values()]
        return (*sentences, *self.unknown)

    def document(self) -> dict[str, Any]:
        """Return the verdict as plain values for JSON."""
        culprits = [{k: v for k, v in asdict(one).items() if k not in ("since_ns", "shared")} for one in self.culprits]
        secondary = [f"{_ranks(self.victims)} {_plural(self.victims, 'wait')} because of this"] if self.victims else []
        return {"culprits": culprits, "secondary": secondary, "unknown": list(self.unknown)}


def verdict(
    dumps: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str] | None = None, ended: Collection[int] = ()
) -> HangVerdict:
    """Return which ranks cause a hang, according to the dumps of all ranks.

    dumps: for each rank, the result of flight_recorder.load().
    hosts: for each rank, its host.
    ended: the ranks whose program ended with status 0.
    """
    if not dumps:
        return HangVerdict()
    if flight_recorder.omit_finished_calls(dumps.values()):
        return HangVerdict(unknown=(ONLY_UNFINISHED,))
    found = search(dumps, ended).verdict()
    hosts = hosts or {}
    culprits = tuple(replace(one, host=hosts.get(one.rank, "")) for one in found.culprits)
    return replace(found, culprits=culprits)


def search(dumps: Mapping[int, Mapping[str, Any]], ended: Collection[int] = ()) -> Search:
    """Return which ranks wait for which others, according to the dumps."""
    unreadable = {rank: str(dump[UNREADABLE]) for rank, dump in dumps.items() if UNREADABLE in dump}
    return Search(flight_recorder.recordings(dumps), unreadable, ended)


class Search:
    """Finds the ranks that cause one hang, by following which ranks wait for which others."""

    def __init__(
        self, ranks: Mapping[int, Recording], unreadable: Mapping[int, str], ended: Collection[int] = ()
    ) -> None:
        self.ranks, self.unreadable, self.ended = ranks, unreadable, ended
        self.pending = {rank: one.pending for rank, one in ranks.items()}
        self.members = self._all_members()
        self.orders = {group: self._order(group) for group in self.members}
        self.world = self._world()
        self.open = list(dict.fromkeys(operation for found in self.pending.values() for operation in found))
        self.timed = self._starts_are_recorded()
        self.found: dict[int, Culprit] = {}
        self.causes: dict[int, Operation] = {}  # for each rank at fault, the call in which the others wait
        self.unknown: list[str] = []
        # For each call that all members have made: its time, and what is unknown about it.
        self.all_called: list[tuple[int, str]] = []
        self.differ = False

    def verdict(self) -> HangVerdict:
        for operation in self.open:
            self._look_at(operation)
        if self.all_called:  # later calls may only wait for the first one
            more = len(self.all_called) - 1
            self.unknown.append(min(self.all_called)[1])
            self.unknown += [
                f"{counted(more, 'later call')} did not finish either, perhaps only because of these ranks"
            ] * bool(more)
        self._drop_guesses()
        self._look_at_unreadable()
        if not self.found and not self.unknown:
            self._look_for_a_cycle()
        if self.open and not self.found and not self.unknown:
            waiting = [rank for rank, operations in self.pending.items() if operations]
            self.unknown.append(
                f"{_ranks(waiting)} {_plural(waiting, 'wait')}, and the dumps do not show for which rank"
            )
        if any(one.kind == NOT_CALLED for one in self.found.values()) and self._is_gloo():
            self.unknown.append(
                "gloo does not record sends and receives: only the stack of a rank shows whether the rank waits in one"
            )
        if silent := self.open and self.world - self.ranks.keys() - self.found.keys() - self.unreadable.keys():
            why = "" if self.found.keys() & set(self.ended) else f", and no other rank waits for {_it(silent)}"
            self.unknown.append(f"{_ranks(silent)} left no dump{why}")
        self._drop_unproven()
        culprits = sorted(self.found.values(), key=lambda one: (one.kind in UNPROVEN, one.since_ns or 2**63, one.rank))
        victims = tuple(sorted(rank for rank, waits in self.pending.items() if waits and rank not in self.found))
        shown = bool(self.open) or len(self.unknown) > len(self.unreadable)
        return HangVerdict(tuple(culprits), victims, tuple(dict.fromkeys(self.unknown)), self.differ, shown)

    def _drop_unproven(self) -> None:
        """Drop a rank without a dump if another rank is proven to be at fault for the same call.

        The dropped rank probably only waits for the other one.
        """
        proven = {(one.group, one.collective, one.number) for one in self.found.values() if one.kind not in UNPROVEN}
        for one in list(self.found.values()):
            if one.kind == NO_DUMP and (one.group, one.collective, one.number) in proven:
                self.unknown.append(f"where rank {one.rank} is: it left no dump that can be read")
                del self.found[one.rank]

    # Who is in a group

    def _all_members(self) -> dict[Group, frozenset[int]]:
        """Return the members of each group.

        If no dump lists them, return the ranks that used the group, or all ranks for the default group.
        """
        users: dict[Group, set[int]] = {}
        for rank, one in self.ranks.items():
            for group in one.groups:
                users.setdefault(group, set()).add(rank)
        listed = {group: group.members for one in self.ranks.values() for group in one.groups if group.members}
        all_ranks = frozenset(self.ranks).union(*listed.values())
        return {
            group: group.members or (all_ranks if group.description == DEFAULT else frozenset(ranks))
            for group, ranks in users.items()
        }

    def _world(self) -> frozenset[int]:
        """Return all ranks that a dump mentions."""
        listed = (group.members for one in self.ranks.values() for group in one.groups if group.members)
        return frozenset(self.ranks).union(*listed)

    def _order(self, group: Group) -> tuple[int, ...]:
        """Return the global ranks of a group, in the order of their ranks in the group.

        Normally, the dumps list the members in this order. But some recorders list them in another order, or use global
        ranks in messages. Each message contains the rank's own number in the group, which shows the right order.
        """
        named = {rank: one.places[group] for rank, one in self.ranks.items() if group in one.places}
        in_order = tuple(sorted(self.members[group]))
        by_itself = tuple(rank if rank in in_order else -1 for rank in range(max(in_order, default=-1) + 1))
        candidates = (group.order or in_order, in_order, by_itself)

        def fits(order: tuple[int, ...]) -> bool:
            pairs = ((rank, *places) for rank, found in named.items() for places in found)
            return all(
                own < len(order) and order[own] == rank and peer < len(order) and order[peer] >= 0
                for rank, own, peer in pairs
            )

        return next(filter(fits, candidates), candidates[0])

    def is_listed(self, group: Group) -> bool:
        """Return whether the dumps list all members of the group, including members that never used it."""
        return bool(group.members) or group.description == DEFAULT

    def concerned(self, operation: Operation) -> frozenset[int]:
        """Return the ranks that take part in an operation, as global ranks."""
        group, what = operation
        if isinstance(what, Message):
            order = self.orders[group]
            return frozenset(order[one] for one in (what.src, what.dst) if one < len(order))
        return self.members[group]

    # What a rank has done about an operation

    def state(self, rank: int, operation: Operation) -> str | None:
        """Return the state of the rank's call, or None if the rank has not made the call."""
        one = self.ranks[rank]
        if call := one.call(operation):
            return call.state
        group, what = operation
        if not isinstance(what, int) or one.last.get(group, -1) < what:
            return None
        return FORGOTTEN if one.may_have_forgotten else DONE

    def _is_first(self, rank: int, operation: Operation) -> bool:
        """Return whether this call is the oldest unfinished one on the rank's device, as far as the recorder shows."""
        one = self.ranks[rank]
        call, oldest = one.call(operation), one.call(self.pending[rank][0])
        return bool(call and oldest and call.order == oldest.order and not one.may_have_forgotten)

    def _starts_are_recorded(self) -> bool:
        """Return whether the recorders record when a device starts a call.

        They do if a call has started on one rank before another rank has made it. Then a call in the state 'scheduled'
        has not started.
        """
        for operation in self.open:
            states = [self.state(rank, operation) for rank in self.concerned(operation) & self.ranks.keys()]
            if STARTED in states and (None in states or not self.concerned(operation) <= self.ranks.keys()):
                return True
        return False

    # The search

    def _look_at(self, operation: Operation) -> None:
        if operation[1] == CUT:
            return
        concerned = self.concerned(operation)
        states = {rank: self.state(rank, operation) for rank in sorted(concerned & self.ranks.keys())}
        absent = [rank for rank, state in states.items() if state is None]
        waiting = [rank for rank, state in states.items() if state in (SCHEDULED, STARTED)]
        done = [rank for rank, state in states.items() if state == DONE]
        listed = self.is_listed(operation[0])
        if isinstance(operation[1], Message) and not listed:  # src and dst cannot be mapped to global ranks
            return
        if isinstance(operation[1], Message) and not all(self.ranks[rank].complete for rank in states):
            done = []  # the count starts at the oldest pending message, so older ones prove nothing
        self._look_at_silent(operation, states, waiting)
        # If the count starts at the oldest pending message, the number of a receive that waits for its device is a
        # guess.
        guessed = isinstance(operation[1], Message) and not all(self.ranks[rank].complete for rank in states)
        guessed = guessed and not any(self._is_first(rank, operation) for rank in waiting)
        for rank in absent if not guessed else ():
            self._look_at_absent(rank, operation, waiting)
        if self._differs(operation, [*waiting, *done]):
            return  # no device can finish calls that differ
        first = [rank for rank in waiting if self._is_first(rank, operation)]
        everybody = listed and len(states) == len(concerned) and not absent
        name = self.name(operation).lstrip("_").partition(" ")[0]
        one_way = name == "reduce" or name.startswith(ONE_WAY)
        stuck = self._stuck(states, first, waiting, done, everybody=everybody, one_way=one_way)
        for rank in stuck:
            others = [other for other in waiting if other != rank] or done
            self._blame(rank, DEVICE_STUCK, operation, others, self._does_not_advance(rank, operation, states, done))
        if not stuck and everybody and waiting and len(first) == len(waiting):
            since = min(call.created_ns for call in self._calls(operation))
            self.all_called.append((since, self._all_called(operation, concerned, waiting)))

    def _look_at_silent(self, operation: Operation, states: Mapping[int, str | None], waiting: Sequence[int]) -> None:
        """Blame the ranks of an operation that left no dump. Such a rank has ended, lost its connection, or died."""
        concerned = self.concerned(operation)
        left = {rank for rank in concerned & set(self.ended) if states.get(rank) is None}
        for rank in sorted(concerned - self.ranks.keys() - self.unreadable.keys()):
            if rank in left:
                text = "{has} not called {what}, in which {others} {wait}: {its} program has ended with exit status 0"
                wait = _plural(waiting, "wait")
                clause = _clause(text, what=self.called(operation), others=_ranks(waiting), wait=wait)
                self._blame(rank, NOT_CALLED, operation, waiting, clause)
            elif left:  # a rank that lost its connection to an ended rank may fail before it writes a dump
                continue
            elif waiting and all(self._lost_its_peer(other, operation) for other in waiting):
                clause = _clause(
                    "left no dump, and {what} of {others} failed before the timeout: "
                    "the connection to {its} process broke",
                    what=self.called(operation),
                    others=_ranks(waiting),
                )
                self._blame(rank, PEER_LOST, operation, waiting, clause)
            else:
                clause = _clause("left no dump: {its} process may be dead or unresponsive")
                self._blame(rank, NO_DUMP, operation, waiting, clause)

    def _look_at_absent(self, rank: int, operation: Operation, waiting: Sequence[int]) -> None:
        """Blame a rank that has not made the call, unless it waits in another call or its dump may lack the call."""
        whether = f"whether rank {rank} called {self.called(operation)}"
        if self._is_older(rank, operation, waiting):
            self.unknown.append(f"{whether}: its dump is older than that call")
        elif self.pending[rank]:
            return
        elif isinstance(operation[1], Message) and self.ranks[rank].may_have_forgotten:
            why = "its recorder has overwritten its older calls; TORCH_FR_BUFFER_SIZE=2000 keeps more"
            self.unknown.append(f"{whether}: {why}")
        else:
            self._blame(rank, NOT_CALLED, operation, waiting, self._not_called(rank, operation))

    def _all_called(self, operation: Operation, concerned: Collection[int], waiting: Sequence[int]) -> str:
        """Return what is unknown about an unfinished call that all members have made."""
        called = f"{_ranks(concerned)} {_have(concerned)} called {self.called(operation)}"
        sent, received = self._elements(operation, concerned)
        if sent != received:
            return (
                f"{called}, and send {sent} elements but expect {received}: the sizes of one of them are wrong, and "
                "the dumps do not show whose"
            )
        return (
            f"{called}, and {_ranks(waiting)} {_have(waiting)} not finished it: a device or a link between them is "
            "stuck; TORCH_NCCL_ENABLE_TIMING=1 records which one"
        )

    def _stuck(
        self, states: Mapping[int, str | None], first: Sequence[int], waiting: Sequence[int], done: Sequence[int],
        *, everybody: bool, one_way: bool,
    ) -> list[int]:  # fmt: skip
        """Return the ranks whose device or link is stuck.

        everybody: whether all members have made the call.
        one_way: whether the root or the sender may finish before the others.
        """
        started = [rank for rank in waiting if states[rank] == STARTED]
        late = [rank for rank in first if states[rank] == SCHEDULED]
        if everybody and len(states) == 1:  # a group of one rank waits for no other rank
            return list(first)
        if late and (started or self.timed or (done and everybody and self._any_timed())):
            return late
        if reached := [rank for rank in late if self._shows_starts(rank)]:
            return reached
        if not done or not everybody or len(first) < len(waiting):
            return []
        # If data flows in one direction only, a waiting rank may wait for another rank to forward the data.
        alone = len(first) == 1 and FORGOTTEN not in states.values()
        return list(first) if alone or not one_way else []

    def _shows_starts(self, rank: int) -> bool:
        """Return whether the rank's recorder shows when a call starts on the device.

        It does if it has recorded a start. If only other recorders have recorded starts, assume that this one records
        them, too, unless it has recorded the end of a call without a start.
        """
        own = self.ranks[rank]
        return own.timed or (self._any_timed() and not own.untimed)

    def _any_timed(self) -> bool:
        return any(one.timed for one in self.ranks.values())

    def _blame(self, rank: int, kind: str, operation: Operation, waiting: Sequence[int], clause: Clause) -> None:
        """Add a rank to the root causes.

        If ranks wait for it in several operations, keep the operation in which a rank has waited longest.
        """
        calls = [call for other in waiting if (call := self.ranks[other].call(operation))]
        since = min((call.created_ns for call in calls), default=0)
        before = self.found.get(rank)
        if before and (before.since_ns or 2**63) <= (since or 2**63):
            return
        group, what = operation
        name = _message(operation) if isinstance(what, Message) else calls[0].name if calls else self.name(operation)
        number = None if isinstance(what, Message) else what
        others = tuple(sorted(waiting))
        self.causes[rank] = operation
        self.found[rank] = Culprit(
            *(rank, "", kind, group.name, group.description, name, number, others),
            evidence=f"rank {rank} {clause.one}",
            since_ns=since,
            shared=clause.several,
        )

    def keys(self, operation: Operation, ranks: Iterable[int]) -> dict[int, tuple[Any, ...]]:
        """Return the values that must agree between the ranks, for each rank that has made the call.

        If one rank lists no sizes or no types, omit them for all ranks.
        """
        calls = {rank: call for rank in ranks if (call := self.ranks[rank].call(operation)) and not call.cut}
        sized = not any(None in (*call.input_sizes, *call.output_sizes) for call in calls.values())
        typed = not any(None in (*call.input_dtypes, *call.output_dtypes) for call in calls.values())
        if isinstance(operation[1], Message):
            complete = {rank: call for rank, call in calls.items() if self.ranks[rank].complete and sized}
            return {rank: _of_message(call, typed=typed) for rank, call in complete.items()}
        return {rank: _must_agree(call, sized=sized, typed=typed) for rank, call in calls.items()}

    def _differs(self, operation: Operation, ranks: Sequence[int]) -> bool:
        """Return whether the ranks made different calls in one operation. If so, blame the minority of the ranks."""
        keys = self.keys(operation, ranks)
        calls = {rank: call for rank in ranks if (call := self.ranks[rank].call(operation)) and not call.cut}
        counts = Counter(keys.values()).most_common()
        if len(counts) < 2:
            return False
        right, tie = counts[0][0], counts[0][1] == counts[1][1]
        if tie:
            by_call = [[rank for rank, key in keys.items() if key == each] for each, _ in counts]
            shown = _described([calls[same[0]] for same in by_call])
            calling = "; ".join(f"{_ranks(same)} called {call}" for same, call in zip(by_call, shown, strict=True))
            self.differ = True
            self.unknown.append(f"{calling} ({_where(operation)}): the dumps do not show whose call is wrong")
            return True
        usual = next(calls[rank] for rank, key in keys.items() if key == right)
        for rank in (rank for rank, key in keys.items() if key != right):
            others = [other for other in calls if other != rank]
            mine, theirs = _described([calls[rank], usual])
            clause = _clause(
                "called {mine} where {others} called {theirs} ({where})",
                mine=mine,
                others=_ranks(r for r in others if keys[r] != keys[rank]),
                theirs=theirs,
                where=_where(operation),
            )
            self._blame(rank, MISMATCH, operation, others, clause)
        return True

    def _elements(self, operation: Operation, ranks: Collection[int]) -> tuple[int, int]:
        """Return how many elements the ranks send and how many they expect to receive in an all_to_all.

        The two numbers must be equal, even if the sizes differ between ranks. Return (0, 0) for other collectives, or
        if a size is unknown.
        """
        calls = [self.ranks[rank].call(operation) for rank in ranks]
        found = [call for call in calls if call and len(call.kinds) == 1 and call.name.startswith(UNEVEN)]
        sizes = [(_count(call.input_sizes[0]), _count(call.output_sizes[0])) for call in found]
        known = [(sent, received) for sent, received in sizes if sent is not None and received is not None]
        if len(known) < len(calls):
            return 0, 0
        return sum(sent for sent, _ in known), sum(received for _, received in known)

    def _is_older(self, rank: int, operation: Operation, waiting: Sequence[int]) -> bool:
        """Return whether a rank's dump was certainly written before the waiting ranks made the call.

        If a waiting rank's dump seems older than its own call, the clocks are wrong: return False.
        """
        calls = [
            (self.ranks[other].written_ns, call.created_ns)
            for other in waiting
            if (call := self.ranks[other].call(operation))
        ]
        written = self.ranks[rank].written_ns
        plausible = all(created <= at for at, created in calls)
        return bool(calls and written and plausible and written + CLOCKS_NS < min(created for _, created in calls))

    def _lost_its_peer(self, rank: int, operation: Operation) -> bool:
        """Return whether torch gave up on the rank's call before the timeout, because a connection broke."""
        one = self.ranks[rank]
        call = one.call(operation)
        return bool(call and call.failed_ns and call.created_ns <= one.written_ns < call.failed_ns)

    def _look_at_unreadable(self) -> None:
        """Report each rank whose dump cannot be read. The rank is not blamed, because its calls are unknown."""
        self.unknown += [
            f"what rank {rank} has called: its dump cannot be read: {why}"
            for rank, why in sorted(self.unreadable.items())
            if rank not in self.found
        ]

    def _waits(self, rank: int, operation: Operation) -> bool:
        return self.state(rank, operation) in (SCHEDULED, STARTED)

    def _drop_guesses(self) -> None:
        """Drop a rank that is blamed only for a missing message, if the message may not really be missing.

        If a recorder has overwritten calls, the count of the messages may be wrong. If all ranks that wait for the
        message have a stuck device, the stuck devices explain the wait.
        """
        stuck = {one.rank for one in self.found.values() if one.kind == DEVICE_STUCK}
        for one in list(self.found.values()):
            guessed = one.number is None and not all(self.ranks[rank].complete for rank in one.waiting_ranks)
            if one.kind == NOT_CALLED and guessed and stuck.issuperset(one.waiting_ranks):
                del self.found[one.rank]

    def _sequence(self, rank: int) -> list[str]:
        """Return the descriptions of the groups whose collectives a rank called, in the order of the calls."""
        calls = self.ranks[rank].collectives()
        return [group.description or group.name for _, group in sorted(calls, key=lambda one: one[0])]

    def _is_send(self, rank: int, operation: Operation) -> bool:
        group, what = operation
        return isinstance(what, Message) and self.orders[group][what.src] == rank

    def _is_gloo(self) -> bool:
        return frozenset().union(*(one.backends for one in self.ranks.values())) == {"gloo"}

    def _look_for_a_cycle(self) -> None:
        """Blame ranks that wait for each other in different calls: they make their calls in different orders."""
        if not all(one.complete for one in self.ranks.values()):
            return
        waits_for: dict[int, set[int]] = {rank: set() for rank in self.ranks}
        for rank, operations in self.pending.items():
            for operation in operations:
                if self._is_send(rank, operation) and operation != operations[-1]:
                    continue  # the program has continued after this send
                peers = self.concerned(operation) & self.ranks.keys() if self.is_listed(operation[0]) else set()
                waits_for[rank] |= {other for other in peers if self.state(other, operation) is None}
        in_cycle = sorted(rank for rank in waits_for if rank in _reached(rank, waits_for))
        # An asynchronous send does not block its rank. So if only sends of a rank are unfinished, and other ranks wait
        # for its next call, this rank has stopped outside of its recorded calls.
        senders = [rank for rank in in_cycle if all(self._is_send(rank, operation) for operation in self.pending[rank])]
        for rank in senders:
            for operation in self.open:
                waiting = [one for one in sorted(self.concerned(operation) & self.ranks.keys()) if one != rank]
                waiting = [one for one in waiting if self._waits(one, operation)]
                if waiting and rank in self.concerned(operation) and self.state(rank, operation) is None:
                    self._blame(rank, NOT_CALLED, operation, waiting, self._not_called(rank, operation))
        if senders:
            return
        # If all ranks but one make the same calls in the same kinds of groups, this rank has skipped a call or made an
        # extra one.
        sequences = {rank: self._sequence(rank) for rank in self.ranks}
        alone = [rank for rank in in_cycle if not any(_agree(sequences, rank, other) for other in self.ranks)]
        in_cycle = alone or in_cycle
        for rank in in_cycle:
            operation = self.pending[rank][0]
            others = sorted(other for other in waits_for[rank] if rank in waits_for[other])
            others = others or sorted(waits_for[rank])
            clause = _clause(
                "waits in {what} for {others}, and {others} {wait} for it in another call: their calls differ in order",
                what=self.called(operation),
                others=_ranks(others),
                wait=_plural(others, "wait"),
            )
            self._blame(rank, MISMATCH, operation, others, clause)

    # Sentences

    def name(self, operation: Operation) -> str:
        return next((call.name for call in self._calls(operation)), "a collective")

    def _calls(self, operation: Operation) -> list[Call]:
        calls = (one.call(operation) for one in self.ranks.values())
        return [call for call in calls if call]

    def called(self, operation: Operation) -> str:
        """Return the operation as text, such as 'all_reduce number 42 of group tp (3)'."""
        name = _message(operation) if isinstance(operation[1], Message) else self.name(operation)
        return f"{name} {_where(operation)}"

    def _not_called(self, rank: int, operation: Operation) -> Clause:
        group, what = operation
        waiting = [other for other in self.concerned(operation) & self.ranks.keys() if operation in self.pending[other]]
        last = self.ranks[rank].last.get(group)
        seen = "program made no call in that group" if last is None else f"last call in that group is number {last}"
        before = "" if isinstance(what, Message) else f"{{its}} {seen}, and "
        return _clause(
            "{has} not called {what}, in which {others} {wait}; "
            + before
            + (
                "{its} other calls are sends, for which a program does not wait"
                if self.pending[rank]
                else "{it_waits} in no other group"
            ),
            what=self.called(operation),
            others=_ranks(waiting),
            wait=_plural(waiting, "wait"),
        )

    def _does_not_advance(
        self, rank: int, operation: Operation, states: Mapping[int, str | None], done: Sequence[int]
    ) -> Clause:
        what = self.called(operation)
        if done:
            text = "{has} called {what}, which {others} finished: {its} GPU or link is stuck"
            return _clause(text, what=what, others=_ranks(done))
        if states[rank] == SCHEDULED:
            started = [other for other, state in states.items() if state == STARTED]
            peers = f", which {_ranks(started)} started" if started else ""
            text = "{has} called {what}{peers}, and {its} device has not started it: {its} GPU is stuck"
            return _clause(text, what=what, peers=peers)
        text = "{has} called {what}, and {its} device does not finish it: {its} GPU or link is stuck"
        return _clause(text, what=what)


class Clause(NamedTuple):
    """The evidence against one rank ('has not called ...'), and against several ('have not called ...')."""

    one: str
    several: str


ONE = {"has": "has", "its": "its", "it_waits": "it waits"}
SEVERAL = {"has": "have", "its": "their", "it_waits": "they wait"}


def _clause(text: str, **values: str) -> Clause:
    return Clause(text.format(**values, **ONE), text.format(**values, **SEVERAL))


def _must_agree(call: Call, *, sized: bool, typed: bool) -> tuple[Any, ...]:
    """Return the values that must be equal on every rank of a collective.

    They include the sizes if `sized`, and the types if `typed`.
    """
    found: list[Any] = []
    for place, kind in enumerate(call.kinds):
        input_types = None if kind in ANY_INPUT_TYPE or not typed else _types(call.input_dtypes, place)
        output_types = None if kind in NO_OUTPUT or not typed else _types(call.output_dtypes, place)
        if kind.startswith(UNEVEN) or "_v" in kind[-9:]:
            found.append((kind, input_types, output_types))
            continue
        sizes = None if kind in NO_INPUT or not sized else _nth(call.input_sizes, place)
        results = None if kind in NO_OUTPUT or not sized else _nth(call.output_sizes, place)
        found.append((kind, sizes, results, input_types, output_types))
    return tuple(found)


def _nth(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _types(values: Sequence[Any], place: int) -> frozenset[Any]:
    found = _nth(values, place)
    return frozenset(found) if isinstance(found, tuple) else frozenset()


def _of_message(call: Call, *, typed: bool) -> tuple[Any, ...]:
    """Return the size and type that a send and its receive must have in common."""
    send = call.kinds == ("send",)
    sizes, types = (call.input_sizes, call.input_dtypes) if send else (call.output_sizes, call.output_dtypes)
    return sizes, types if typed else ()


def _described(calls: Sequence[Call]) -> list[str]:
    """Return each call as text, such as 'all_reduce of [1024, 8]'. If all inputs are equal, add the outputs."""
    shown = [f"{call.name}{_shape(call.input_sizes)}{_type(call.input_dtypes)}" for call in calls]
    if len(set(shown)) > 1:
        return shown
    return [
        f"{text} into{_shape(call.output_sizes).removeprefix(' of')}{_type(call.output_dtypes)}"
        for text, call in zip(shown, calls, strict=True)
    ]


def _shape(sizes: Sequence[Any]) -> str:
    first = _nth(sizes, 0)
    return f" of {list(first[0])}" if isinstance(first, tuple) and first and isinstance(first[0], tuple) else ""


def _type(types: Sequence[Any]) -> str:
    first = _nth(types, 0)
    return f" {first[0]}" if isinstance(first, tuple) and first else ""


def _count(shapes: Any) -> int | None:
    """Return the number of elements of tensors with these shapes, or None if unknown."""
    known = isinstance(shapes, tuple) and shapes and all(isinstance(shape, tuple) for shape in shapes)
    numbers = [number for shape in shapes for number in shape] if known else [None]
    return sum(math.prod(shape) for shape in shapes) if all(isinstance(one, int) for one in numbers) else None


def _message(operation: Operation) -> str:
    what = operation[1]
    assert isinstance(what, Message)
    return f"send/recv {what.src}->{what.dst}"


def _where(operation: Operation) -> str:
    group, what = operation
    at = f"number {what} of " if isinstance(what, int) else "of "
    return f"{at}{'the default group' if group.description == DEFAULT else group}"


def _agree(sequences: Mapping[int, Sequence[str]], rank: int, other: int) -> bool:
    """Return whether two ranks made the same calls, up to the end of the shorter sequence."""
    one, two = sequences[rank], sequences[other]
    return rank != other and all(map(operator.eq, one, two))


def _reached(start: int, edges: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    ahead = list(edges[start])
    while ahead:
        one = ahead.pop()
        if one not in found:
            found.add(one)
            ahead.extend(edges[one])
    return found


def _plural(ranks: Sequence[int], verb: str) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"


def _have(ranks: Collection[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _it(ranks: Collection[int]) -> str:
    return "them" if len(ranks) > 1 else "it"


def _joined(found: Sequence[Culprit]) -> str:
    """Return 'ranks 3,7 have not called ...' for two culprits with the same evidence."""
    if len(found) == 1:
        return found[0].evidence
    return f"{_ranks(one.rank for one in found)} {found[0].shared}"


def _ranks(found: Iterable[int]) -> str:
    numbers = sorted(found)
    return f"rank{'s' * (len(numbers) > 1)} {ranges(numbers)}"
