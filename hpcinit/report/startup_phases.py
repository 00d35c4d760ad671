"""Computes the phases of a start-up from its events: how long each took on every rank, and which ranks were slow."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hpcinit.base.text import rank_names
from hpcinit.records.timeline import EVENTS, Attempt

NOT_OF_A_NODE = ("submitted", "allocated")  # events with times of the login node and of Slurm's controller


@dataclass(frozen=True)
class Clock:
    """The clock of a node, compared with the clock of rank 0's node.

    offset_s: how many seconds the clock of rank 0's node is ahead.
    within_s: the maximum error of offset_s.
    """

    offset_s: float
    within_s: float


def clock_offsets(attempt: Attempt) -> dict[str, Clock]:
    """Return the clock of each host. Omit a host if the rendezvous measured no offset to rank 0's node
    (rendezvous/protocol.py).

    Use the measurement with the smallest error. If the offset is smaller than its error, use 0.
    """
    found = {}
    measured = [(rank.clock[1], rank.clock[0], rank.host) for rank in attempt.ranks if rank.clock]
    for within, offset, host in sorted(measured, reverse=True):
        found[host] = Clock(offset, within) if abs(offset) > within else Clock(0.0, abs(offset) + within)
    return {**found, **{rank.host: Clock(0.0, 0.0) for rank in attempt.ranks[:1]}}


def corrected(attempt: Attempt, clocks: Mapping[str, Clock]) -> Attempt:
    """Return `attempt` with the times of all events converted to the clock of rank 0's node."""
    ranks = []
    for rank in attempt.ranks:
        offset = clocks[rank.host].offset_s if rank.host in clocks else 0.0
        moved = {k: v if k in NOT_OF_A_NODE else v + offset for k, v in rank.events.items()}
        ranks.append(replace(rank, events=moved))
    return replace(attempt, ranks=tuple(ranks))


# For each event that ends a phase: the phase's name, and whether a rank mostly waits for others in this phase.
NAMES = {
    "allocated": ("queue", False),
    "started": ("Slurm starts the task", False),
    "spawned": ("agent rendezvous, starts ranks", False),
    "interpreter": ("Python starts", False),
    "forked": ("fork server imports, forks", False),
    "met": ("connects to rank 0", True),
    "imported": ("imports", False),
    "device": ("device", False),
    "store": ("waits for all ranks", True),
    "joined": ("process group", True),
    "collective": ("first collective", True),
    "up": ("rest of init", False),
}
QUEUE = "allocated"
SLOW, SLOW_S = 1.25, 0.5  # a slow rank takes 25% and 0.5 s longer than the median
MOST_LISTED = 3


@dataclass(frozen=True)
class Phase:
    """A phase of the start-up.

    ends: the name of the event that ends the phase.
    took: how many seconds the phase took, by rank.
    start: when the phase started, by rank.
    """

    ends: str
    took: Mapping[int, float]
    start: Mapping[int, float]

    @property
    def name(self) -> str:
        return NAMES[self.ends][0]

    @property
    def waits(self) -> bool:
        return NAMES[self.ends][1]

    @property
    def least(self) -> float:
        return min(self.took.values())

    @property
    def median(self) -> float:
        return statistics.median(self.took.values())

    @property
    def most(self) -> float:
        return max(self.took.values())

    @property
    def spread(self) -> float:
        """Return the seconds between the first and the last rank that completed this phase."""
        ends = [self.start[rank] + took for rank, took in self.took.items()]
        return max(ends) - min(ends)


@dataclass(frozen=True)
class SlowPhase:
    """The slow ranks of one node in a phase.

    whole: whether all ranks of the node are slow.
    took: how many seconds the slowest of them took.
    """

    host: str
    ranks: tuple[int, ...]
    whole: bool
    took: float

    def __str__(self) -> str:
        names = rank_names(self.ranks)
        return f"{self.host} ({names})" if self.whole and len(self.ranks) > 1 else f"{names} on {self.host}"


@dataclass(frozen=True)
class Report:
    """A report on the start-up of one attempt.

    attempt: the attempt, with all times by the clock of rank 0's node.
    clocks: the clock of each host.
    """

    attempt: Attempt
    clocks: Mapping[str, Clock]
    phases: tuple[Phase, ...]

    @property
    def hosts(self) -> dict[int, str]:
        return {rank.rank: rank.host for rank in self.attempt.ranks}

    @property
    def silent_hosts(self) -> list[str]:
        """Return the nodes on which no rank recorded an event."""
        return [host for host in self.attempt.hosts if host not in self.hosts.values()]


def startup_phases(attempt: Attempt) -> Report:
    """Return the report on the start-up of an attempt. Its times are converted to the clock of rank 0's node."""
    clocks = clock_offsets(attempt)
    same = corrected(attempt, clocks)
    took: dict[str, dict[int, float]] = {name: {} for name in EVENTS}
    start: dict[str, dict[int, float]] = {name: {} for name in EVENTS}
    for rank in same.ranks:
        at = list(rank.events.items())
        for (_, first), (name, second) in pairwise(at):
            took[name][rank.rank], start[name][rank.rank] = second - first, first
    phases = (Phase(name, took[name], start[name]) for name in EVENTS if took[name])
    return Report(same, clocks, tuple(phases))


def slow_phases(report: Report, phase: Phase) -> list[SlowPhase]:
    """Return the ranks that took much longer than most in a phase, grouped by node, slowest node first."""
    if phase.waits or phase.ends == QUEUE:
        return []
    limit = max(SLOW * phase.median, phase.median + SLOW_S)
    found = {rank for rank, took in phase.took.items() if took > limit}
    hosts = report.hosts
    by_host: dict[str, list[int]] = {}
    for rank in phase.took:
        by_host.setdefault(hosts[rank], []).append(rank)
    groups = []
    for host, ranks in by_host.items():
        if own := tuple(sorted(found.intersection(ranks))):
            groups.append(SlowPhase(host, own, len(own) == len(ranks), max(phase.took[rank] for rank in own)))
    return sorted(groups, key=lambda group: -group.took)


def waited_for(report: Report, phase: Phase) -> tuple[SlowPhase, float] | None:
    """Return the rank for which all others waited in this phase, and how many seconds it started after the median rank.

    Return None if the delay is short, or if the ranks do not wait for each other in this phase.
    """
    if phase.ends != "store" or len(phase.start) < 2:
        return None
    last = max(phase.start, key=lambda rank: phase.start[rank])
    behind = phase.start[last] - statistics.median(phase.start.values())
    host = report.hosts[last]
    return (SlowPhase(host, (last,), False, phase.took[last]), behind) if behind > SLOW_S else None


def list_slow(groups: Sequence[SlowPhase]) -> str:
    """List slow ranks as text, such as 'n2 (ranks 2-3) 5.2 s, rank 7 on n4 3.1 s and 2 more'."""
    listed = [f"{group} {seconds(group.took)}" for group in groups[:MOST_LISTED]]
    more = len(groups) - MOST_LISTED
    return ", ".join(listed) + (f" and {more} more" if more > 0 else "")


def missing_ranks(report: Report) -> list[str]:
    """Return sentences about the ranks that did not complete start-up. Ranks with the least progress are first."""
    attempt = report.attempt
    lines = []
    if attempt.absent:
        empty = f"; no rank of {_listed(report.silent_hosts)} started" if report.silent_hosts else ""
        lines.append(f"{rank_names(attempt.absent)} did not start: no timeline entry{empty}")
    by_event: dict[str, list[int]] = {}
    for rank in attempt.ranks:
        by_event.setdefault(rank.furthest, []).append(rank.rank)
    names = list(EVENTS)
    for event in sorted(by_event, key=lambda name: names.index(name) if name else -1):
        ranks = by_event[event]
        if event != names[-1]:
            where = _listed(sorted({report.hosts[rank] for rank in ranks}))
            after = f"'{event}' ({EVENTS[event]})" if event else "the start of the process"
            lines.append(f"{rank_names(ranks)} on {where} stopped after {after}")
    if before_init(report):
        lines.append("a program that calls init_process_group instead of hpcinit.init() records no later events")
    return lines


def before_init(report: Report) -> bool:
    """Return whether all ranks have started but none has called hpcinit.init(). A program need not call it."""
    attempt = report.attempt
    return not attempt.absent and all(rank.furthest == "met" for rank in attempt.ranks)


def _listed(names: Iterable[str], most: int = 8) -> str:
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def seconds(value: float) -> str:
    """Return a duration as text, such as '0.4 ms', '12 ms', '3.2 s' or '512 s'."""
    size = abs(value)
    if size < 0.0995:
        return f"{value * 1000:.{1 if size < 0.00995 else 0}f} ms"
    return f"{value:.{2 if size < 0.995 else 1 if size < 99.5 else 0}f} s"
