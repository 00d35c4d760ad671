"""A law from how long start-ups took: above all of them, and honest about what few of them can tell."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcinit.facts.errors import RequestError
from hpcinit.facts.fitting import Start, exceeding, fit, longest

MANY = st.lists(st.builds(Start, st.integers(1, 512), st.floats(0.01, 2000)), min_size=10, max_size=60)


def starts(*pairs: tuple[int, float]) -> list[Start]:
    return [Start(*pair) for pair in pairs]


def test_a_law_that_is_there_is_found() -> None:
    """From start-ups of 20 + 0.5 x nodes seconds and less, that line comes out, and twice of it is proposed."""
    chance = random.Random(1)
    seen = [
        Start(nodes, 20 + 0.5 * nodes - early)
        for nodes in (2, 8, 64)
        for early in (0, *(chance.uniform(0, 9) for _ in range(5)))
    ]
    found = fit(seen, max_s=1800)
    assert (found.base_s, found.per_node_s) == pytest.approx((20, 0.5))
    assert (found.law.base_s, found.law.per_node_s, found.law.max_s) == (60, 1.0, 1800)
    assert (found.starts, found.nodes) == (18, (2, 8, 64))
    assert fit(seen, max_s=1800, margin=4).law.base_s == 80


@given(MANY)
def test_no_start_up_that_was_seen_exceeds_the_law(seen: list[Start]) -> None:
    """Whatever was seen, the line lies above all of it and touches some of it, and the proposal is no lower."""
    if len(longest(seen)) < 2:
        return
    found = fit(seen, max_s=1e9)
    gaps = [found.base_s + found.per_node_s * start.nodes - start.waited_s for start in seen]
    assert min(gaps) == pytest.approx(0, abs=1e-6)
    assert all(found.law.start_up(start.nodes).total_seconds() >= start.waited_s for start in seen)


def test_fewer_nodes_that_took_longer_give_no_falling_line() -> None:
    """Where small jobs happened to take longer, the law is flat: more nodes never get less time."""
    found = fit(starts(*[(1, 300.0), (64, 100.0)] * 5), max_s=3600)
    assert (found.base_s, found.per_node_s) == (300, 0)


def test_the_confidence_is_kept() -> None:
    """In 400 histories of 20 start-ups each, the line is exceeded by more than the told part in at most 1 of 20."""
    chance, told, broken = random.Random(7), exceeding(20), 0
    for _ in range(400):
        seen = [Start(nodes, nodes + chance.expovariate(0.1)) for nodes in chance.choices((1, 4, 16, 64), k=20)]
        found = fit(seen, max_s=1e9)
        later = [(nodes, nodes + chance.expovariate(0.1)) for nodes in chance.choices((1, 4, 16, 64), k=2000)]
        broken += sum(took > found.base_s + found.per_node_s * nodes for nodes, took in later) / 2000 > told
    assert broken <= 400 * 0.05 + 12  # two standard deviations and a half


@pytest.mark.parametrize(("count", "part"), [(10, 0.394), (20, 0.216), (60, 0.0766), (1000, 0.00473)])
def test_what_so_many_start_ups_tell(count: int, part: float) -> None:
    """The bound solves its equation: at that part, the chance that a line is worse is 5 %."""
    assert exceeding(count) == pytest.approx(part, rel=0.01)
    told = exceeding(count)
    assert (1 - told) ** count + count * told * (1 - told) ** (count - 1) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([], "no start that came to its end"),
        (starts(*[(4, 10.0)] * 30), r"only starts on one number of nodes: 4 \(30\)"),
        (
            starts((1, 10.0), (4, 12.0), (4, 13.0)),
            r"needs 10 start-ups .* here are 3, by nodes: 1 \(1\), 4 \(2\); 7 more",
        ),
    ],
)
def test_too_little_was_seen(seen: list[Start], said: str) -> None:
    """It refuses where the history cannot tell, and says what it lacks."""
    with pytest.raises(RequestError, match=said):
        fit(seen, max_s=3600)


def test_a_margin_below_the_line() -> None:
    """A margin that would put the timeout below what was seen is refused."""
    with pytest.raises(RequestError, match=r"--margin is 0\.5, expected 1 or more"):
        fit(starts(*[(1, 1.0), (2, 2.0)] * 5), max_s=3600, margin=0.5)
