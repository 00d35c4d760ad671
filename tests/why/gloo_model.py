"""A model of what gloo does with the programs of a replay (hpcinit/jobs/replay_ranks.py), for thousands of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def run(program: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result that jobs/replay_ranks.py prints for a program."""
    ranks = [_Rank(steps) for steps in program["steps"]]
    made: dict[tuple[int, int], int] = {}  # how many collectives a rank has called in a group
    called: dict[tuple[int, int], dict[int, int]] = {}  # the step of each rank, by group and number of the collective
    open_messages: dict[tuple[int, int, frozenset[int]], tuple[int, int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, one in enumerate(ranks):
            for place in one.next_steps():
                moved = True
                one.states[place] = "w"
                _, group, what, peer, tag, _ = one.steps[place]
                members = program["groups"][group]
                if what == "allreduce":
                    number = made[group, rank] = made.get((group, rank), 0) + 1
                    ends = called.setdefault((group, number), {})
                    ends[rank] = place
                    over = ends if len(ends) == len(members) else {}
                else:
                    key = (group, tag, frozenset({rank, members[peer]}))
                    other = open_messages.pop(key, None)
                    over = {rank: place, other[0]: other[1]} if other else {}
                    if not other:
                        open_messages[key] = (rank, place)
                for each, step in over.items():
                    ranks[each].states[step] = "f"
    return {"states": ["".join(one.states) for one in ranks], "settled": True, "error": ""}


class _Rank:
    def __init__(self, steps: list[Any]) -> None:
        self.steps, self.states = steps, ["n"] * len(steps)
        self.streams: dict[int, list[int]] = {}
        for place, step in enumerate(steps):
            self.streams.setdefault(step[0], []).append(place)

    def next_steps(self) -> list[int]:
        """Return the steps that can be made now."""
        found = []
        for places in self.streams.values():
            while places and self.states[places[0]] == "f":
                del places[0]
            first = places[0] if places else None
            if first is not None and self.states[first] == "n" and self._is_ready(first):
                found.append(first)
        return found

    def _is_ready(self, place: int) -> bool:
        return all(self.states[other] == "f" for other in self.steps[place][5])
