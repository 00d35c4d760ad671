"""How long a start-up may take, as a function of the node count.

    start_up = min(max, base + per_node x nodes)

Where the default coefficients come from: docs/timeouts.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from hpcinit.facts.errors import RequestError


@dataclass(frozen=True)
class TimeoutLaw:
    """Coefficients in seconds. Raises RequestError for a law that gives no positive time."""

    base_s: float = 300.0
    per_node_s: float = 3.5
    max_s: float = 3600.0

    def __post_init__(self) -> None:
        if not (self.base_s > 0 and self.per_node_s >= 0 and self.max_s > 0):
            raise RequestError(
                f"timeouts: base {self.base_s:g} s, per node {self.per_node_s:g} s, at most {self.max_s:g} s; expected "
                "base and maximum above 0, and per node at least 0"
            )

    def start_up(self, nodes: int) -> timedelta:
        """Time until all ranks of `nodes` nodes have joined; whole seconds."""
        return timedelta(seconds=min(self.max_s, self.base_s + math.ceil(self.per_node_s * nodes)))

    def formula(self, nodes: int) -> str:
        """The law with its numbers, for the log line: 'min(3600, 300 + 3.5 x 8 nodes) = 328 s'."""
        seconds = self.start_up(nodes).total_seconds()
        terms = f"{self.base_s:g} + {self.per_node_s:g} x {nodes} node{'s' if nodes != 1 else ''}"
        return f"min({self.max_s:g}, {terms}) = {seconds:g} s"
