"""A timeout law out of how long start-ups took: base + per_node x nodes, above all of them, and a margin.

The line is the lowest one that no start-up exceeds: base and per_node at least 0, base + per_node x n at least the
longest start-up of n nodes for every n, and on average over the start-ups as low as can be. For such a line, two
numbers chosen by m independent start-ups, the share V of all start-ups like these that exceed it is bounded whatever
their distribution is: P(V > e) <= (1-e)^m + m e (1-e)^(m-1) (Campi and Garatti, The exact feasibility of randomized
solutions of uncertain convex programs, SIAM J. Optim. 19, 2008, theorem 1 with d = 2). What is proposed is that line
times a margin, since a timeout that is too short costs more than one that is too long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from hpcinit.facts.errors import RequestError
from hpcinit.facts.timeouts import TimeoutLaw

CONFIDENCE = 0.95
LEAST_STARTS = 10  # with fewer, more than 39 % of the start-ups could take longer than the line
LEAST_BASE_S = 60.0  # no proposal is below: one node's kernels alone took 55 s to load (docs/timeouts.md)
MARGIN = 2.0


@dataclass(frozen=True)
class Start:
    """One start-up that came to its end. waited_s: the longest that a rank was under its timeout."""

    nodes: int
    waited_s: float


@dataclass(frozen=True)
class Fit:
    """base_s, per_node_s: the line. law: with the margin, what is proposed. exceed: with CONFIDENCE, of start-ups like
    these at most that part takes longer than the line."""

    base_s: float
    per_node_s: float
    law: TimeoutLaw
    exceed: float
    starts: int
    nodes: tuple[int, ...]
    margin: float


def fit(starts: Sequence[Start], max_s: float, margin: float = MARGIN) -> Fit:
    """max_s: the law's maximum, which stays. Raises RequestError that says what is lacking."""
    if margin < 1:
        raise RequestError(f"--margin is {margin:g}, expected 1 or more: times the line above all start-ups")
    by_nodes = longest(starts)
    counts = ", ".join(f"{nodes} ({sum(start.nodes == nodes for start in starts)})" for nodes in by_nodes)
    if len(by_nodes) < 2:
        seen = f"only starts on one number of nodes: {counts}" if by_nodes else "no start that came to its end"
        raise RequestError(
            "a law needs start-ups of at least two numbers of nodes, the further apart the better, and here are "
            f"{seen}; what does not depend on the nodes cannot be told from what does"
        )
    if len(starts) < LEAST_STARTS:
        raise RequestError(
            f"a law needs {LEAST_STARTS} start-ups that came to their end, and here are {len(starts)}, by nodes: "
            f"{counts}; {LEAST_STARTS - len(starts)} more, on any number of nodes, and every restart of a job counts"
        )
    base, slope = _line(by_nodes, sum(start.nodes for start in starts) / len(starts))
    law = TimeoutLaw(
        base_s=float(max(LEAST_BASE_S, math.ceil(margin * base))),
        per_node_s=math.ceil(margin * slope * 100) / 100,
        max_s=max_s,
    )
    return Fit(base, slope, law, exceeding(len(starts)), len(starts), tuple(by_nodes), margin)


def longest(starts: Sequence[Start]) -> dict[int, float]:
    """Seconds by number of nodes, the fewest nodes first."""
    found: dict[int, float] = {}
    for start in sorted(starts, key=lambda start: start.nodes):
        found[start.nodes] = max(start.waited_s, found.get(start.nodes, 0.0))
    return found


def _line(by_nodes: Mapping[int, float], mean_nodes: float) -> tuple[float, float]:
    """The lowest at `mean_nodes` of all lines above the points: a linear program in two unknowns, whose solution stands
    at a corner, and of those there are few."""
    points = list(by_nodes.items())
    corners = [(max(waited for _, waited in points), 0.0), (0.0, max(waited / nodes for nodes, waited in points))]
    for (n, waited), (m, longer) in combinations(points, 2):
        slope = (longer - waited) / (m - n)
        corners.append((waited - slope * n, slope))
    above = [
        (base, slope)
        for base, slope in corners
        if base >= 0 and slope >= 0 and all(base + slope * n >= waited - 1e-9 for n, waited in points)
    ]
    return min(above, key=lambda line: line[0] + line[1] * mean_nodes)


def exceeding(starts: int, confidence: float = CONFIDENCE) -> float:
    """The e with (1-e)^m + m e (1-e)^(m-1) = 1 - confidence, for m start-ups; by bisection, it falls with e."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        tail = (1 - middle) ** starts + starts * middle * (1 - middle) ** (starts - 1)
        low, high = (middle, high) if tail > 1 - confidence else (low, middle)
    return high
