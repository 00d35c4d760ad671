"""How far the nodes' clocks differ, from what the ranks wrote of their start; and the moments by one clock.

Nothing is measured that was not there anyway. The meeting bounds a difference (hpcinit.runtime.meeting.clock), and so
does the barrier that ends a start: no rank leaves it before all have entered. The tightest bounds count. A
clock that may be right within them is left alone. When a file was written, by its server's clock, says less: lines
stay in a node's memory for up to half a minute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hpcinit.facts.timeline import Attempt

NOT_OF_A_NODE = ("submitted", "allocated")  # by the clock of the login node, of Slurm's controller


@dataclass(frozen=True)
class Clock:
    """offset_s: to be added to a node's time for that of rank 0's node. within_s: how wrong that may be."""

    offset_s: float
    within_s: float


def of(attempt: Attempt) -> dict[str, Clock]:
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
        moved = {k: v if k in NOT_OF_A_NODE else v + offset for k, v in rank.moments.items()}
        ranks.append(replace(rank, moments=moved))
    return replace(attempt, ranks=tuple(ranks))


def _bounds(attempt: Attempt, home: str) -> dict[str, tuple[float, float]]:
    """(least, most) that is to be added to a host's time for that of `home`."""
    found: dict[str, tuple[float, float]] = {}
    for host, least, most in (*_of_meeting(attempt), *_of_barrier(attempt, home)):
        before = found.get(host, (-math.inf, math.inf))
        found[host] = max(before[0], least), min(before[1], most)
    return {**found, home: (0.0, 0.0)} if home else found


def _of_meeting(attempt: Attempt) -> Iterator[tuple[str, float, float]]:
    for rank in attempt.ranks:
        if rank.clock is not None:
            offset, within = rank.clock
            yield rank.host, offset - within, offset + within


def _of_barrier(attempt: Attempt, home: str) -> Iterator[tuple[str, float, float]]:
    """By host the last to enter and the first to leave: each must have left after the other had entered."""
    entered: dict[str, float] = {}
    left: dict[str, float] = {}
    for rank in attempt.ranks:
        if {"joined", "collective"} <= rank.moments.keys():
            entered[rank.host] = max(rank.moments["joined"], entered.get(rank.host, -math.inf))
            left[rank.host] = min(rank.moments["collective"], left.get(rank.host, math.inf))
    for host in left.keys() - {home} if home in left else ():
        yield host, entered[home] - left[host], left[home] - entered[host]
