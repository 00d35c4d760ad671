"""Ports that every rank computes alike."""

from __future__ import annotations

from itertools import pairwise

from hpcinit.world import network


def test_candidates_are_the_same_everywhere() -> None:
    """One job has the same ports on every rank, today and tomorrow: ranks of two releases must still meet."""
    assert network.candidate_ports("6.0.0") == network.candidate_ports("6.0.0")
    assert network.candidate_ports("6.0.0")[:3] == (31753, 32762, 21003)


def test_candidates_are_different_and_in_range() -> None:
    """Eight different ports, none of which the kernel hands out, for each of thousands of jobs."""
    for job in range(5000):
        found = network.candidate_ports(f"{job}.0.0")
        assert len(set(found)) == network.PORT_COUNT
        assert all(network.FIRST_PORT <= port <= network.LAST_PORT for port in found)


def test_neighbours_rarely_share_a_port() -> None:
    """Of 1000 consecutive jobs, the next one on the same node has another first port; a restart too."""
    firsts = [network.candidate_ports(f"{job}.0.0")[0] for job in range(1001)]
    assert all(one != other for one, other in pairwise(firsts))
    assert network.candidate_ports("7.0.0")[0] != network.candidate_ports("7.0.1")[0]


def test_the_range_is_below_the_kernels() -> None:
    """No candidate is one of the ports that Linux by default gives to outgoing connections, 32768 to 60999."""
    assert 20_000 <= network.FIRST_PORT < network.LAST_PORT < 32_768
