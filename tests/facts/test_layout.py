"""Where a rank stands in a layout; tests/runtime/test_seeds.py holds it against torch's meshes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcinit.facts.errors import RequestError
from hpcinit.facts.layout import DIMENSIONS, Layout

layouts = st.lists(st.integers(1, 4), min_size=5, max_size=5).map(lambda degrees: Layout(*degrees))


def test_neighbours_are_in_one_tensor_parallel_group() -> None:
    """The last dimension counts fastest, and the first slowest."""
    layout = Layout(pp=2, dp_replicate=1, dp_shard=2, tp=2)
    place = {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert layout.coordinate(5) == place and list(layout.coordinate(5)) == list(DIMENSIONS)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@given(layouts)
def test_every_rank_has_a_place_of_its_own(layout: Layout) -> None:
    """No two ranks share a coordinate, and each is below its degree."""
    world_size = math.prod(layout.degrees().values())
    places = [layout.coordinate(rank) for rank in range(world_size)]
    assert len({tuple(place.values()) for place in places}) == world_size
    assert all(0 <= place[name] < degree for place in places for name, degree in layout.degrees().items())


@given(layouts)
def test_data_rank_is_the_place_in_both_data_parallel_dimensions(layout: Layout) -> None:
    """Ranks have the same data_rank exactly if both their data parallel coordinates agree; they count from 0."""
    found: dict[int, set[tuple[int, int]]] = {}
    for rank in range(math.prod(layout.degrees().values())):
        place = layout.coordinate(rank)
        found.setdefault(layout.data_rank(rank), set()).add((place["dp_replicate"], place["dp_shard"]))
    assert sorted(found) == list(range(layout.dp_replicate * layout.dp_shard))
    assert all(len(places) == 1 for places in found.values())


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist(rank: int) -> None:
    """A rank outside of the layout is refused, with the number of ranks that there are."""
    with pytest.raises(RequestError, match=f"rank {rank} has no place in .*: 4 ranks"):
        Layout(dp_replicate=2, tp=2).coordinate(rank)


def test_an_open_degree_is_refused() -> None:
    """Without the world size there is no coordinate to tell."""
    with pytest.raises(RequestError, match=r"parallel.dp_replicate is -1, use over\(world_size\)"):
        Layout(tp=2).data_rank(0)
