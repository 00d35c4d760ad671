"""Ports that every rank computes alike."""

from __future__ import annotations

from itertools import pairwise

from hpcinit.facts import ports


def test_candidates_are_the_same_everywhere() -> None:
    """One job has the same ports on every rank, today and tomorrow: ranks of two releases must still meet."""
    assert ports.candidates("6.0.0") == ports.candidates("6.0.0")
    assert ports.candidates("6.0.0")[:3] == (31753, 32762, 21003)


def test_candidates_are_different_and_in_range() -> None:
    """Eight different ports, none of which the kernel hands out, for each of thousands of jobs."""
    for job in range(5000):
        found = ports.candidates(f"{job}.0.0")
        assert len(set(found)) == ports.COUNT
        assert all(ports.FIRST <= port <= ports.LAST for port in found)


def test_neighbours_rarely_share_a_port() -> None:
    """Of 1000 consecutive jobs, the next one on the same node has another first port; a restart too."""
    firsts = [ports.candidates(f"{job}.0.0")[0] for job in range(1001)]
    assert all(one != other for one, other in pairwise(firsts))
    assert ports.candidates("7.0.0")[0] != ports.candidates("7.0.1")[0]


def test_the_range_is_below_the_kernels() -> None:
    """No candidate is one of the ports that Linux by default gives to outgoing connections, 32768 to 60999."""
    assert 20_000 <= ports.FIRST < ports.LAST < 32_768
