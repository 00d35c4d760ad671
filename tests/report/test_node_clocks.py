"""Differences between the nodes' clocks, which the rendezvous measures."""

from __future__ import annotations

import pytest

from hpcinit.records.timeline import Attempt, Rank
from hpcinit.report import startup_phases
from hpcinit.report.startup_phases import Clock


def attempt(*clocks: tuple[float, float] | None) -> Attempt:
    """Rank 0 on n1, and on n2 one rank for each of these measurements. n2's clock is 5 s ahead."""
    first = Rank(0, "n1", events={"allocated": 0.5, "started": 1.0})
    events = {"allocated": 0.5, "started": 6.0}
    others = (Rank(number, "n2", events=events, clock=clock) for number, clock in enumerate(clocks, 1))
    return Attempt("43.0.0", 1 + len(clocks), 2, (first, *others))


@pytest.mark.parametrize("clocks", [((-5.0, 0.001),), ((-4.0, 2.0), (-5.0, 0.001)), ((-5.0, 0.001), (-4.0, 2.0))])
def test_a_wrong_clock_is_corrected(clocks: tuple[tuple[float, float], ...]) -> None:
    """The most exact measurement of a node counts. The allocation's time is not by the clock of the node."""
    found = startup_phases.clock_offsets(attempt(*clocks))
    assert found == {"n1": Clock(0.0, 0.0), "n2": Clock(-5.0, 0.001)}
    assert startup_phases.corrected(attempt(*clocks), found).ranks[1].events == {"allocated": 0.5, "started": 1.0}


def test_a_clock_that_may_be_right_is_not_corrected() -> None:
    """A difference that may be zero is not corrected, and its bound is returned."""
    assert startup_phases.clock_offsets(attempt((0.04, 0.05)))["n2"] == Clock(0.0, 0.09)


def test_a_rank_without_a_measurement() -> None:
    """Without a measurement there is no correction, and the events stay unchanged."""
    lone = attempt(None)
    assert set(startup_phases.clock_offsets(lone)) == {"n1"}
    assert startup_phases.corrected(lone, startup_phases.clock_offsets(lone)) == lone
