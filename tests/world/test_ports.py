"""The ports that every rank computes."""

from __future__ import annotations

from itertools import pairwise

from hpcinit.world import network


def test_candidates_are_the_same_everywhere() -> None:
    """One job has the same ports on every rank, in every release: ranks of two releases must find each other."""
    assert network.candidate_ports("6.0.0") == network.candidate_ports("6.0.0")
    assert network.candidate_ports("6.0.0")[:3] == (31753, 32762, 21003)


def test_candidates_are_different_and_in_range() -> None:
    """Each of thousands of jobs has eight different ports below the usual ephemeral range, and three below 9000."""
    for job in range(5000):
        found = network.candidate_ports(f"{job}.0.0")
        assert len(set(found)) == network.PORT_COUNT + network.LOW_PORT_COUNT
        assert all(network.FIRST_PORT <= port <= network.LAST_PORT for port in found[: network.PORT_COUNT])
        assert all(5_000 <= port < 9_000 for port in found[network.PORT_COUNT :])


def test_neighbours_rarely_share_a_port() -> None:
    """Consecutive jobs, and restarts of one job, have different first ports, for 1000 jobs."""
    firsts = [network.candidate_ports(f"{job}.0.0")[0] for job in range(1001)]
    assert all(one != other for one, other in pairwise(firsts))
    assert network.candidate_ports("7.0.0")[0] != network.candidate_ports("7.0.1")[0]


def test_the_range_is_below_the_kernels() -> None:
    """No candidate is one of the ports that Linux by default gives to outgoing connections, 32768 to 60999."""
    assert 20_000 <= network.FIRST_PORT < network.LAST_PORT < 32_768
