"""Which ranks measure the way between them, in which order, and which of the ways are slow.

inside    rank i and i + 1 of a node, around it                       NVLink, PCIe, shared memory
between   local rank r of a node and the same of the next, around     the network, with every adapter that ranks use
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Pair(NamedTuple):
    a: int
    b: int
    between_nodes: bool


def pairs(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """nodes: the ranks of each node. Each pair of ranks once, those inside of nodes first."""
    found = [Pair(a, b, False) for ranks in nodes for a, b in _ring(ranks)]
    for here, there in _ring(range(len(nodes))):
        found += [Pair(a, b, True) for a, b in zip(nodes[here], nodes[there], strict=False)]
    return found


def _ring(items: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours; two have one way between them, one has none."""
    if len(items) < 2:
        return []
    around = [(items[i], items[(i + 1) % len(items)]) for i in range(len(items))]
    return around if len(items) > 2 else around[:1]


def phases(wanted: Sequence[Pair]) -> list[list[Pair]]:
    """In each phase no rank has two to talk to; ways inside of nodes and between them are not measured together."""
    found: list[tuple[bool, set[int], list[Pair]]] = []
    for pair in wanted:
        for between, busy, members in found:
            if between == pair.between_nodes and not busy & {pair.a, pair.b}:
                busy |= {pair.a, pair.b}
                members.append(pair)
                break
        else:
            found.append((pair.between_nodes, {pair.a, pair.b}, [pair]))
    return [members for _, _, members in found]


class Rule(NamedTuple):
    """What is slow: in every round more than `factor` times the median of all, more than `mads` median absolute
    deviations above it, and by more than `least`. Repeated, because a neighbour's job may pass by once."""

    factor: float
    mads: float = 3.0
    least: float = 0.0


def slow(times: Mapping[K, Sequence[float]], rule: Rule) -> list[K]:
    """times: the rounds of each; the larger the slower. Of fewer than three nothing can be told."""
    rounds = min((len(values) for values in times.values()), default=0)
    if len(times) < 3 or not rounds:
        return []
    left = set(times)
    for number in range(rounds):
        values = {key: times[key][number] for key in times}
        median = statistics.median(values.values())
        mad = statistics.median(abs(value - median) for value in values.values())
        limit = max(rule.factor * median, median + rule.mads * mad, median + rule.least)
        left &= {key for key, value in values.items() if value > limit}
    return [key for key in times if key in left]
