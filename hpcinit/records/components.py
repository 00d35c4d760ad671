"""Components of a heterogeneous job in one world. Ranks are numbered over them in order. Other jobs have one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Component:
    """Nodes with the same number of ranks."""

    nodes: int
    ranks_per_node: int

    def __str__(self) -> str:
        nodes, ranks = self.nodes, self.ranks_per_node
        return f"{nodes} node{'s' * (nodes != 1)} x {ranks} rank{'s' * (ranks != 1)}"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def ranks(parts: Sequence[Component]) -> int:
    """Return the number of ranks of all components."""
    return sum(part.ranks for part in parts)


def ranks_in_a_row(parts: Sequence[Component]) -> int:
    """Return how many consecutive ranks are on one node, counted from any multiple of that number."""
    return math.gcd(*(part.ranks_per_node for part in parts))


def shape(parts: Sequence[Component]) -> str:
    """Return '2 nodes x 4 ranks + 1 node x 1 rank'."""
    return " + ".join(map(str, parts))


def node_of(parts: Sequence[Component], rank: int) -> int:
    """Return the index of a rank's node among the nodes of all components, in order."""
    nodes = 0
    for part in parts:
        if rank < part.ranks:
            return nodes + rank // part.ranks_per_node
        nodes, rank = nodes + part.nodes, rank - part.ranks
    raise IndexError(f"no component has rank {rank}")
