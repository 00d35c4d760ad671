"""Layouts and timeouts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcinit.base.errors import RequestError
from hpcinit.records.layout import DIMENSIONS, Layout
from hpcinit.records.startup_timeout import StartupTimeout


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 304), (2, 307), (8, 328), (32, 412), (64, 524), (256, 1196), (943, 3600), (9000, 3600)])  # fmt: skip
def test_the_default_formula(nodes: int, seconds: int) -> None:
    """The default formula is min(3600, 300 + ceil(3.5 x nodes)), and its text shows the result."""
    formula = StartupTimeout()
    assert formula.start_up(nodes).total_seconds() == seconds
    assert formula.text(nodes) == f"min(3600, 300 + 3.5 x {nodes} node{'s' * (nodes != 1)}) = {seconds} s"


degrees = st.lists(st.integers(1, 8), min_size=5, max_size=5)


@given(degrees, st.sampled_from(DIMENSIONS), st.integers(1, 64))
def test_a_degree_of_minus_one(sizes: list[int], name: str, rest: int) -> None:
    """A degree of -1 becomes the world size divided by the other degrees."""
    given_degrees = {**dict(zip(DIMENSIONS, sizes, strict=True)), name: -1}
    others = math.prod(d for d in given_degrees.values() if d != -1)
    full = Layout(**given_degrees).over(others * rest)
    assert getattr(full, name) == rest and math.prod(full.degrees().values()) == others * rest


@given(degrees, st.integers(1, 4096))
def test_the_product_is_the_world_size_or_it_is_refused(sizes: list[int], world_size: int) -> None:
    """A layout without a -1 is accepted only if its product is the number of ranks."""
    layout = Layout(*sizes)
    if math.prod(sizes) == world_size:
        assert layout.over(world_size) == layout
    else:
        with pytest.raises(RequestError, match=f"= {math.prod(sizes)} ranks?, but {world_size} ranks?; "):
            layout.over(world_size)
