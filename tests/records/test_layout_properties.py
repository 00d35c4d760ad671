"""10,000 random layouts: an accepted one partitions the ranks, a refusal shows why and which layouts fit."""

from __future__ import annotations

import math
import random
import re
from collections import Counter

from hpcinit.base.errors import RequestError
from hpcinit.records.layout import DIMENSIONS, Layout
from hpcinit.runtime import mesh
from tests.records.groups import group_members

CASES = 10_000


def described(random_: random.Random) -> tuple[dict[str, int], int, int]:
    """Return degrees (some of them impossible), nodes and ranks per node; about a third fit."""
    nodes, per_node = random_.choice([1, 2, 3, 4, 6, 8, 16]), random_.choice([1, 2, 3, 4, 6, 8])
    left, degrees = nodes * per_node, dict.fromkeys(DIMENSIONS, 1)
    for name in random_.sample(DIMENSIONS, 3):
        degrees[name] = random_.choice([n for n in range(1, left + 1) if left % n == 0])
        left //= degrees[name]
    degrees[random_.choice(DIMENSIONS)] *= left
    if random_.random() < 0.5:
        degrees[random_.choice(DIMENSIONS)] = -1
    if random_.random() < 0.5:
        degrees[random_.choice(DIMENSIONS)] = random_.choice([-1, 0, 1, 2, 3, 4, 5, 7, 8, 12, 16])
    degrees["ep"] = random_.choice([1, 1, 1, 1, 2, 3, 4])
    return degrees, nodes, per_node


def outcome(degrees: dict[str, int], nodes: int, per_node: int, across: bool) -> Layout | str:
    try:
        return Layout(**degrees, tp_across_nodes=across).over(nodes * per_node, per_node)  # type: ignore[arg-type]
    except RequestError as error:
        return str(error)


def test_ten_thousand_layouts() -> None:
    """In an accepted layout every kind of group partitions the ranks. A refused layout has a true reason, and the degrees
    and node counts in the message are accepted."""
    random_, seen = random.Random(4), Counter[str]()
    for _ in range(CASES):
        degrees, nodes, per_node = described(random_)
        across = random_.random() < 0.3
        found = outcome(degrees, nodes, per_node, across)
        if isinstance(found, Layout):
            seen["accepted"] += 1
            check_groups(found, degrees, nodes * per_node)
            assert across or all(len({r // per_node for r in each}) == 1 for each in group_members(found, "tp"))
        else:
            seen[reason(found, degrees, nodes, per_node, across)] += 1
    assert sum(seen.values()) == CASES
    assert {name for name, count in seen.items() if count > 100} == {"accepted", "value", "open", "experts", "node", "product"}, seen  # fmt: skip


def check_groups(layout: Layout, degrees: dict[str, int], world_size: int) -> None:
    """Check that sizes are as requested, and that the groups of each name partition the ranks."""
    assert all(degree in (-1, getattr(layout, name)) for name, degree in degrees.items())
    assert math.prod(layout.degrees().values()) == world_size
    for name in mesh.NAMES:
        groups = group_members(layout, name)
        assert sorted(rank for each in groups for rank in each) == list(range(world_size)), name
        sizes = {len(each) for each in groups}
        expected = math.prod(getattr(layout, part) for part in mesh.COMBINED.get(name, (name,))) if name not in {"edp_shard", "edp_replicate"} else None  # fmt: skip
        assert sizes == {expected} if expected else len(sizes) == 1


def reason(message: str, degrees: dict[str, int], nodes: int, per_node: int, across: bool) -> str:
    """Return the kind of reason, after checking that it is true and that each proposed layout is accepted."""
    product = math.prod(degree for name, degree in degrees.items() if name != "ep" and degree != -1)
    open_ = [name for name in DIMENSIONS if degrees[name] == -1]
    if found := re.match(r"parallel\.(\w+) is (-?\d+), expected 1 or more", message):
        assert degrees[found[1]] == int(found[2]) < 1
        return "value"
    if "are -1, but only one of them may be" in message:
        assert len(open_) == 2
        return "open"
    if found := re.match(r"parallel\.ep is (\d+), expected a divisor of parallel\.(\w+)=(\d+)", message):
        assert degrees["ep"] == int(found[1]) and int(found[3]) % int(found[1])
        for ep in re.findall(r"parallel\.ep=(\d+)", message):
            assert "parallel.ep" not in str(outcome({**degrees, "ep": int(ep)}, nodes, per_node, True)).split()[:1]
        return "experts"
    if found := re.match(r"tp (\d+) does not divide the (\d+) ranks? of a node", message):
        assert per_node == int(found[2]) and per_node % int(found[1]) and not across
        assert isinstance(outcome(degrees, nodes, per_node, True), Layout)
        return "node"
    assert re.search(rf"= {product} ranks?, .*{nodes} nodes? x {per_node} ranks? = {nodes * per_node}; ", message), (
        message
    )
    assert nodes * per_node % product or (not open_ and product != nodes * per_node)
    assert proposals(message), message
    for changed, other in proposals(message):
        assert isinstance(outcome({**degrees, **changed}, other or nodes, per_node, across), Layout), message
    return "product"


def proposals(message: str) -> list[tuple[dict[str, int], int]]:
    """Return the changes that a message proposes: other degrees, or another number of nodes."""
    found: list[tuple[dict[str, int], int]] = []
    for proposal in message.split("; ")[1:]:
        if proposal.startswith("nodes="):
            found += [({}, int(number)) for number in re.findall(r"\d+", proposal)]
        elif proposal.startswith("nearest: "):
            found.append(({name: int(degree) for name, degree in re.findall(r"(\w+) (\d+)", proposal)}, 0))
        else:
            kept, _, other = proposal.rpartition(": ")
            name = other.split()[0]
            same = {each: int(degree) for each, degree in re.findall(r"(\w+) (\d+)", kept)}
            found += [({**same, name: int(number)}, 0) for number in re.findall(r"\d+", other)]
    return found


def test_the_nearest_are_nearest() -> None:
    """The proposed degrees are the closest divisors below and above."""
    for world_size, tp in [(24, 5), (24, 7), (36, 5), (16, 3), (60, 7)]:
        message = str(outcome({"tp": tp}, 1, world_size, False))
        named = [changed["tp"] for changed, _ in proposals(message) if "tp" in changed]
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        assert named == [max(n for n in fitting if n < tp), min(n for n in fitting if n > tp)], message
