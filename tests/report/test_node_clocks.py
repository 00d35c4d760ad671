"""Differences between the nodes' clocks, computed from start-up events."""

from __future__ import annotations

from hpcinit.records.timeline import Attempt, Rank
from hpcinit.report import startup_phases


def attempt(ahead: float, clock: tuple[float, float] | None = None, **n2: float) -> Attempt:
    """Two ranks enter a barrier at 10.0 and 10.2 and leave at 10.3; n2's clock is `ahead` seconds ahead."""
    second = {"started": 1.0 + ahead, "joined": 10.2 + ahead, "collective": 10.3 + ahead, **n2}
    first = {"allocated": 0.5, "started": 1.0, "joined": 10.0, "collective": 10.3}
    events = {"allocated": 0.5, **second}
    return Attempt("43.0.0", 2, 2, (Rank(0, "n1", events=first), Rank(1, "n2", events=events, clock=clock)))


def test_the_barrier_bounds_a_difference() -> None:
    """A difference of 5 s is found, to within the duration of the barrier, and corrected."""
    found = startup_phases.clock_offsets(attempt(5.0))
    clock = found["n2"]
    assert abs(clock.offset_s + 5.0) <= clock.within_s < 0.21
    assert (found["n1"].offset_s, found["n1"].within_s) == (0.0, 0.0)
    same = startup_phases.corrected(attempt(5.0), found).ranks[1].events
    assert abs(same["started"] - 1.0) <= clock.within_s and same["allocated"] == 0.5  # not by the clock of the node


def test_clocks_that_agree_are_not_corrected() -> None:
    """A difference that may be zero is not corrected, and its bound is returned."""
    assert startup_phases.clock_offsets(attempt(0.05))["n2"].offset_s == 0.0
    assert 0.05 < startup_phases.clock_offsets(attempt(0.05))["n2"].within_s < 0.5


def test_the_rendezvous_is_the_tighter_bound() -> None:
    """The bound from the rendezvous is used if it is tighter than that of the barrier."""
    clock = startup_phases.clock_offsets(attempt(5.0, clock=(-5.0, 0.001)))["n2"]
    assert abs(clock.offset_s + 5.0) < 0.0011 and clock.within_s < 0.0011


def test_bounds_that_cross() -> None:
    """If a clock was set during start-up, the gap between the bounds is the uncertainty."""
    clock = startup_phases.clock_offsets(attempt(5.0, clock=(-2.0, 0.1)))["n2"]
    assert -5.0 < clock.offset_s < -2.0 and clock.within_s > 2.0


def test_a_rank_without_bounds() -> None:
    """Without bounds there is no clock correction, and the events stay unchanged."""
    lone = Attempt("43.0.0", 2, 2, (Rank(0, "n1", events={"started": 1.0}), Rank(1, "n2", events={"started": 7.0})))
    assert set(startup_phases.clock_offsets(lone)) == {"n1"}
    assert startup_phases.corrected(lone, startup_phases.clock_offsets(lone)) == lone
