"""The components of a heterogeneous job. A job that is not heterogeneous has exactly one component.

The ranks of all components form one world. They are numbered in the order of the components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Component:
    """Nodes of a job that all have the same number of ranks."""

    nodes: int
    ranks_per_node: int

    def __str__(self) -> str:
        nodes, ranks = self.nodes, self.ranks_per_node
        return f"{nodes} node{'s' * (nodes != 1)} x {ranks} rank{'s' * (ranks != 1)}"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def ranks(parts: Sequence[Component]) -> int:
    """Return the total number of ranks in all components."""
    return sum(part.ranks for part in parts)


def ranks_in_a_row(parts: Sequence[Component]) -> int:
    """Return the largest number N for which ranks 0 to N-1 share a node, ranks N to 2N-1 share a node, and so on."""
    return math.gcd(*(part.ranks_per_node for part in parts))


def shape(parts: Sequence[Component]) -> str:
    """Describe the components, as in '2 nodes x 4 ranks + 1 node x 1 rank'."""
    return " + ".join(map(str, parts))


def node_of(parts: Sequence[Component], rank: int) -> int:
    """Return the index of the node on which `rank` runs. Nodes are counted across all components, in order."""
    nodes = 0
    for part in parts:
        if rank < part.ranks:
            return nodes + rank // part.ranks_per_node
        nodes, rank = nodes + part.nodes, rank - part.ranks
    raise IndexError(f"rank {rank} is not in any component")
