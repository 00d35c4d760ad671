"""The coordinates of a rank in a layout; tests/runtime/test_seeds.py compares them with torch's meshes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcinit.base.errors import RequestError
from hpcinit.records.layout import DIMENSIONS, Layout
from hpcinit.runtime import mesh
from tests.records.groups import group_members

layouts = st.lists(st.integers(1, 4), min_size=5, max_size=5).map(lambda degrees: Layout(*degrees))


def test_adjacent_ranks_are_in_one_tensor_parallel_group() -> None:
    """The last dimension varies fastest, and the first slowest."""
    layout = Layout(pp=2, dp_replicate=1, dp_shard=2, tp=2)
    place = {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert layout.coordinate(5) == place and list(layout.coordinate(5)) == list(DIMENSIONS)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@given(layouts)
def test_every_rank_has_unique_coordinates(layout: Layout) -> None:
    """No two ranks have the same coordinates, and each index is below its degree."""
    world_size = math.prod(layout.degrees().values())
    places = [layout.coordinate(rank) for rank in range(world_size)]
    assert len({tuple(place.values()) for place in places}) == world_size
    assert all(0 <= place[name] < degree for place in places for name, degree in layout.degrees().items())


@given(layouts)
def test_data_rank_depends_on_both_data_parallel_dimensions(layout: Layout) -> None:
    """Ranks have the same data_rank only if both data parallel coordinates are equal; it counts from 0."""
    found: dict[int, set[tuple[int, int]]] = {}
    for rank in range(math.prod(layout.degrees().values())):
        place = layout.coordinate(rank)
        found.setdefault(layout.data_rank(rank), set()).add((place["dp_replicate"], place["dp_shard"]))
    assert sorted(found) == list(range(layout.dp_replicate * layout.dp_shard))
    assert all(len(places) == 1 for places in found.values())


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist(rank: int) -> None:
    """A rank outside the layout is refused with the number of ranks."""
    with pytest.raises(RequestError, match=f"rank {rank} does not exist: .* has 4 ranks"):
        Layout(dp_replicate=2, tp=2).coordinate(rank)


def test_an_open_degree_is_refused() -> None:
    """Without the world size a layout with a -1 has no coordinates."""
    with pytest.raises(
        RequestError, match=r"parallel.dp_replicate is -1, expected a number: call over\(world_size\) first"
    ):
        Layout(tp=2).data_rank(0)


@pytest.mark.parametrize(
    ("layout", "ranks", "per_node", "message"),
    [
        (Layout(dp_replicate=4, tp=8), 24, 8, "dp_replicate 4 x tp 8 = 32 ranks, but 3 nodes x 8 ranks = 24; with tp 8: dp_replicate 3; nodes=4"),
        (Layout(tp=3), 8, 8, "tp 3 = 3 ranks, which does not divide 1 node x 8 ranks = 8; tp 2 or 4"),
        (Layout(tp=3), 8, None, "tp 3 = 3 ranks, which does not divide 8 ranks; tp 2 or 4"),
        (Layout(cp=3, tp=2), 32, 8, "cp 3 x tp 2 = 6 ranks, which does not divide 4 nodes x 8 ranks = 32; with tp 2: cp 2 or 4; nodes=3 or 6"),
        (Layout(1, 2, 3, 1, 5), 16, 8, "30 ranks, but 2 nodes x 8 ranks = 16; nearest: dp_replicate 2 x dp_shard 2 x tp 4"),
        (Layout(1, 2, 3, 5), 14, 2, "30 ranks, but 7 nodes x 2 ranks = 14; nodes=15"),
        (Layout(dp_replicate=1), 8, 4, "one rank each = 1 rank, but 2 nodes x 4 ranks = 8; dp_replicate 8"),
        (Layout(tp=16), 32, 8, "tp 16 does not divide the 8 ranks of a node, and tensor parallel groups must stay inside a node: parallel.tp=8, or"),
        (Layout(tp=3), 18, 6, ""),
        (Layout(tp=4), 24, 6, "tp 4 does not divide the 6 ranks of a node, and tensor parallel groups must stay inside a node: parallel.tp=3 or parallel.tp=6, or parallel.tp_across_nodes=true"),
        (Layout(tp=4, tp_across_nodes=True), 24, 6, ""),
        (Layout(dp_replicate=1, tp=-1), 24, 6, "tp 24 does not divide the 6 ranks of a node"),
        (Layout(dp_replicate=1, dp_shard=-1, tp=4, ep=3), 32, 8, "parallel.ep is 3, expected a divisor of parallel.dp_shard=8, because experts are sharded over these ranks: parallel.ep=2 or parallel.ep=4"),
        (Layout(dp_replicate=-1, ep=3), 8, 8, "parallel.ep is 3, expected a divisor of parallel.dp_replicate=8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_and_what_would(layout: Layout, ranks: int, per_node: int | None, message: str) -> None:
    """A layout that does not fit is refused with the equation and the nearest layouts that fit."""
    if not message:
        assert layout.over(ranks, per_node).data_parallel * layout.tp == ranks
        return
    with pytest.raises(RequestError) as caught:
        layout.over(ranks, per_node)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ep": 0}, "parallel.ep is 0, expected 1 or more"),
        ({"cp_kind": "tree"}, "parallel.cp_kind is 'tree', expected one of: ulysses, ring"),
        ({"dp_shard": 6, "ep": 4}, "parallel.ep is 4, expected a divisor of parallel.dp_shard=6, because experts are sharded over these ranks: parallel.ep=3 or parallel.ep=6"),
    ],
)  # fmt: skip
def test_impossible_values(wrong: dict[str, Any], message: str) -> None:
    """A layout with an impossible value is refused."""
    with pytest.raises(RequestError) as caught:
        Layout(**wrong)
    assert message in str(caught.value)


def test_experts_are_taken_from_the_data_parallel_ranks() -> None:
    """With ep 2 a data parallel dimension of 4 splits into two, and adjacent ranks in it have different experts. The
    other data parallel dimension does not change."""
    layout = Layout(dp_replicate=2, dp_shard=4, tp=2, ep=2)
    assert mesh.mesh_dimensions(layout) == {"dp_replicate": 2, "edp_shard": 2, "ep": 2, "tp": 2}
    assert [list(each) for each in group_members(layout, "ep")][:2] == [[0, 2], [1, 3]]
    assert [list(each) for each in group_members(layout, "edp_shard")][:2] == [[0, 4], [1, 5]]
    assert list(group_members(layout, "dp_replicate")[0]) == [0, 8]
    assert list(group_members(layout, "dp_shard")[0]) == [0, 2, 4, 6]
    assert mesh.mesh_dimensions(Layout(dp_replicate=4, ep=4)) == {"edp_replicate": 1, "ep": 4}
