"""The ports that every rank computes."""

from __future__ import annotations

from itertools import pairwise

from hpcinit.world import ports


def test_candidates_are_the_same_everywhere() -> None:
    """One job has the same ports on every rank, in every release: ranks of two releases must find each other."""
    assert ports.candidate_ports("6.0.0") == ports.candidate_ports("6.0.0")
    assert ports.candidate_ports("6.0.0")[:3] == (31753, 32762, 21003)


def test_candidates_are_different_and_in_range() -> None:
    """Each of thousands of jobs has eight different ports below the usual ephemeral range, and three below 9000."""
    for job in range(5000):
        found = ports.candidate_ports(f"{job}.0.0")
        assert len(set(found)) == ports.PORT_COUNT + ports.LOW_PORT_COUNT
        assert all(ports.FIRST_PORT <= port <= ports.LAST_PORT for port in found[: ports.PORT_COUNT])
        assert all(5_000 <= port < 9_000 for port in found[ports.PORT_COUNT :])


def test_neighbours_rarely_share_a_port() -> None:
    """Consecutive jobs, and restarts of one job, have different first ports, for 1000 jobs."""
    firsts = [ports.candidate_ports(f"{job}.0.0")[0] for job in range(1001)]
    assert all(one != other for one, other in pairwise(firsts))
    assert ports.candidate_ports("7.0.0")[0] != ports.candidate_ports("7.0.1")[0]


def test_the_range_is_below_the_kernels() -> None:
    """No candidate is one of the ports that Linux by default gives to outgoing connections, 32768 to 60999."""
    assert 20_000 <= ports.FIRST_PORT < ports.LAST_PORT < 32_768
