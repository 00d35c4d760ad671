"""From the events of a start-up to its phases: how long each took on every rank, and which ranks were slow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hpcinit.base.text import ranges
from hpcinit.records.timeline import EVENTS, Attempt

# How far the nodes' clocks differ, from what the ranks wrote of their start; and the moments by one clock.
#
# Nothing is measured that was not there anyway. The rendezvous bounds a difference (hpcinit.rendezvous.protocol), and
# so does the barrier that ends a start: no rank leaves it before all have entered. The tightest bounds count. A clock
# that may be right within them is left alone. When a file was written, by its server's clock, says less: lines stay in
# a node's memory for up to half a minute.

NOT_OF_A_NODE = ("submitted", "allocated")  # by the clock of the login node, of Slurm's controller


@dataclass(frozen=True)
class Clock:
    """offset_s: to be added to a node's time for that of rank 0's node. within_s: how wrong that may be."""

    offset_s: float
    within_s: float


def clock_offsets(attempt: Attempt) -> dict[str, Clock]:
    """By host, for those of which something is known; rank 0's own is 0."""
    home = next((rank.host for rank in attempt.ranks), "")
    found = {}
    for host, (least, most) in _bounds(attempt, home).items():
        if least > most:  # a clock was set meanwhile: the gap is what is not known
            found[host] = Clock((least + most) / 2, least - most)
        elif least <= 0 <= most:
            found[host] = Clock(0.0, max(-least, most))
        else:
            found[host] = Clock((least + most) / 2, (most - least) / 2)
    return found


def corrected(attempt: Attempt, clocks: Mapping[str, Clock]) -> Attempt:
    """With all moments by the clock of rank 0's node."""
    ranks = []
    for rank in attempt.ranks:
        offset = clocks[rank.host].offset_s if rank.host in clocks else 0.0
        moved = {k: v if k in NOT_OF_A_NODE else v + offset for k, v in rank.events.items()}
        ranks.append(replace(rank, events=moved))
    return replace(attempt, ranks=tuple(ranks))


def _bounds(attempt: Attempt, home: str) -> dict[str, tuple[float, float]]:
    """(least, most) that is to be added to a host's time for that of `home`."""
    found: dict[str, tuple[float, float]] = {}
    for host, least, most in (*_of_rendezvous(attempt), *_of_barrier(attempt, home)):
        before = found.get(host, (-math.inf, math.inf))
        found[host] = max(before[0], least), min(before[1], most)
    return {**found, home: (0.0, 0.0)} if home else found


def _of_rendezvous(attempt: Attempt) -> Iterator[tuple[str, float, float]]:
    for rank in attempt.ranks:
        if rank.clock is not None:
            offset, within = rank.clock
            yield rank.host, offset - within, offset + within


def _of_barrier(attempt: Attempt, home: str) -> Iterator[tuple[str, float, float]]:
    """By host the last to enter and the first to leave: each must have left after the other had entered."""
    entered: dict[str, float] = {}
    left: dict[str, float] = {}
    for rank in attempt.ranks:
        if {"joined", "collective"} <= rank.events.keys():
            entered[rank.host] = max(rank.events["joined"], entered.get(rank.host, -math.inf))
            left[rank.host] = min(rank.events["collective"], left.get(rank.host, math.inf))
    for host in left.keys() - {home} if home in left else ():
        yield host, entered[home] - left[host], left[home] - entered[host]


# By the moment that ends a phase: its name, and whether a rank waits in it for others rather than works itself.
NAMES = {
    "allocated": ("queue", False),
    "started": ("Slurm starts the task", False),
    "spawned": ("agents meet, start ranks", False),
    "interpreter": ("Python starts", False),
    "forked": ("parent imports, forks", False),
    "met": ("finds rank 0", True),
    "imported": ("imports", False),
    "device": ("device", False),
    "store": ("waits for all ranks", True),
    "joined": ("process group", True),
    "collective": ("first collective", True),
    "up": ("rest of init", False),
}
QUEUE = "allocated"
SLOW, SLOW_S = 1.25, 0.5  # slow is who takes a quarter longer than the median, and half a second
MOST_NAMED = 3


@dataclass(frozen=True)
class Phase:
    """ends: the moment that ends it. took: seconds by rank. begun: when, by rank. waits: it is spent on others."""

    ends: str
    took: Mapping[int, float]
    begun: Mapping[int, float]

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
        """Between the first and the last rank to end it, by one clock."""
        ends = [self.begun[rank] + took for rank, took in self.took.items()]
        return max(ends) - min(ends)


@dataclass(frozen=True)
class SlowPhase:
    """ranks: of one node. whole: they are all of its ranks. took: the longest of them, in seconds."""

    host: str
    ranks: tuple[int, ...]
    whole: bool
    took: float

    def __str__(self) -> str:
        names = f"rank{'s' * (len(self.ranks) > 1)} {ranges(self.ranks)}"
        return f"{self.host} ({names})" if self.whole and len(self.ranks) > 1 else f"{names} on {self.host}"


@dataclass(frozen=True)
class Report:
    """One attempt. attempt: its moments by one clock. clocks: by host, what was added for that."""

    attempt: Attempt
    clocks: Mapping[str, Clock]
    phases: tuple[Phase, ...]

    @property
    def hosts(self) -> dict[int, str]:
        return {rank.rank: rank.host for rank in self.attempt.ranks}

    @property
    def silent_hosts(self) -> list[str]:
        """Nodes of which no rank has left a line."""
        return [host for host in self.attempt.hosts if host not in self.hosts.values()]


def startup_phases(attempt: Attempt) -> Report:
    clocks = clock_offsets(attempt)
    same = corrected(attempt, clocks)
    took: dict[str, dict[int, float]] = {name: {} for name in EVENTS}
    begun: dict[str, dict[int, float]] = {name: {} for name in EVENTS}
    for rank in same.ranks:
        at = list(rank.events.items())
        for (_, first), (name, second) in pairwise(at):
            took[name][rank.rank], begun[name][rank.rank] = second - first, first
    phases = (Phase(name, took[name], begun[name]) for name in EVENTS if took[name])
    return Report(same, clocks, tuple(phases))


def slow_phases(report: Report, phase: Phase) -> list[SlowPhase]:
    """Those who took much longer than most, the slowest first; a node is named where all its ranks are among them."""
    if phase.waits or phase.ends == QUEUE:
        return []
    limit = max(SLOW * phase.median, phase.median + SLOW_S)
    found = {rank for rank, took in phase.took.items() if took > limit}
    hosts = report.hosts
    there: dict[str, list[int]] = {}
    for rank in phase.took:
        there.setdefault(hosts[rank], []).append(rank)
    groups = []
    for host, ranks in there.items():
        if own := tuple(sorted(found.intersection(ranks))):
            groups.append(SlowPhase(host, own, len(own) == len(ranks), max(phase.took[rank] for rank in own)))
    return sorted(groups, key=lambda group: -group.took)


def waited_for(report: Report, phase: Phase) -> tuple[SlowPhase, float] | None:
    """Who came last to where all wait for all, and how long after half of them; None where that is little."""
    if phase.ends != "store" or len(phase.begun) < 2:
        return None
    last = max(phase.begun, key=lambda rank: phase.begun[rank])
    behind = phase.begun[last] - statistics.median(phase.begun.values())
    host = report.hosts[last]
    return (SlowPhase(host, (last,), False, phase.took[last]), behind) if behind > SLOW_S else None


def named(groups: Sequence[SlowPhase]) -> str:
    """'n2 (ranks 2-3) 5.2 s, rank 7 on n4 3.1 s and 2 more'."""
    said = [f"{group} {seconds(group.took)}" for group in groups[:MOST_NAMED]]
    more = len(groups) - MOST_NAMED
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def missing_ranks(report: Report) -> list[str]:
    """Sentences on ranks that have not come to the end of the start: those that came least far first."""
    attempt = report.attempt
    lines = []
    if attempt.absent:
        empty = f"; nobody came from {_listed(report.silent_hosts)}" if report.silent_hosts else ""
        lines.append(f"{_ranks(attempt.absent)} never came: no line of theirs{empty}")
    by_event: dict[str, list[int]] = {}
    for rank in attempt.ranks:
        by_event.setdefault(rank.furthest, []).append(rank.rank)
    names = list(EVENTS)
    for event in sorted(by_event, key=lambda name: names.index(name) if name else -1):
        ranks = by_event[event]
        if event != names[-1]:
            where = _listed(sorted({report.hosts[rank] for rank in ranks}))
            after = f"'{event}' ({EVENTS[event]})" if event else "their beginning"
            lines.append(f"{_ranks(ranks)} on {where} came as far as {after}, and no further")
    if before_init(report):
        lines.append(
            "a program that calls init_process_group itself, and not hpcinit.init(), is seen no further than this"
        )
    return lines


def before_init(report: Report) -> bool:
    """Whether all ranks are there and none of them has called hpcinit.init(), which many a program never does."""
    attempt = report.attempt
    return not attempt.absent and all(rank.furthest == "met" for rank in attempt.ranks)


def _listed(names: Iterable[str], most: int = 8) -> str:
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def seconds(value: float) -> str:
    """'0.4 ms', '12 ms', '3.2 s', '512 s': as exact as it is of use."""
    size = abs(value)
    if size < 0.0995:
        return f"{value * 1000:.{1 if size < 0.00995 else 0}f} ms"
    return f"{value:.{2 if size < 0.995 else 1 if size < 99.5 else 0}f} s"
