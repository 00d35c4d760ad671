"""Limits of a QOS, and limits that depend on the number of nodes, are checked before the job is queued."""

from __future__ import annotations

import pytest

from hpcinit.checks import partition
from hpcinit.config.compose import compose


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "me")  # the files of some clusters contain the user's name


def found(*overrides: str) -> list[str]:
    return list(partition.problems(compose([*overrides, "account=x"])))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster=leonardo", "qos=boost_qos_dbg", "nodes=9", "time_min=30"],
            "nodes=9, but qos 'boost_qos_dbg' of cluster leonardo allows at most 8: nodes=8 or less",
        ),
        (
            ["cluster=leonardo", "qos=boost_qos_dbg", "time_min=31"],
            "time_min=31, but qos 'boost_qos_dbg' of cluster leonardo allows at most 30: time_min=30 or less",
        ),
        (
            ["cluster=leonardo", "time_min=1441"],
            "time_min=1441, but partition 'boost_usr_prod' of cluster leonardo allows at most 1440: time_min=1440 or less",
        ),
        (
            ["cluster=frontier", "qos=debug", "time_min=121", "nodes=200"],
            "time_min=121, but qos 'debug' of cluster frontier allows at most 120: time_min=120 or less",
        ),
        (
            ["cluster=frontier", "nodes=91", "time_min=121"],
            "time_min=121, but partition 'batch' of cluster frontier, with 91 nodes, allows at most 120: time_min=120 or less",
        ),
        (
            ["cluster=frontier", "nodes=180", "spare_nodes=3", "time_min=361"],
            "time_min=361, but partition 'batch' of cluster frontier, with 183 nodes, allows at most 360: time_min=360 or less",
        ),
        (
            ["cluster=clariden", "partition=debug", "nodes=4", "time_min=23"],
            "nodes x time_min = 4 x 23 = 92 node-minutes, but partition 'debug' of cluster clariden allows 90 per job: "
            "time_min=22 or less, or fewer nodes",
        ),
    ],
)
def test_a_request_over_a_limit(overrides: list[str], message: str) -> None:
    """What the site's documentation forbids is refused with the limit and the value that fits."""
    assert found(*overrides) == [message]


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster=leonardo", "qos=boost_qos_dbg", "nodes=8", "time_min=30"],
        ["cluster=leonardo", "qos=boost_qos_lprod", "time_min=5760"],  # longer than the partition's limit
        ["cluster=leonardo", "qos=unknown_qos", "time_min=1440"],
        ["cluster=frontier", "nodes=184", "time_min=720"],
        ["cluster=frontier", "nodes=183", "time_min=360"],
        ["cluster=clariden", "partition=debug", "nodes=4", "time_min=22"],
        ["cluster=clariden", "partition=debug", "nodes=1", "time_min=90"],
    ],
)
def test_a_request_within_the_limits(overrides: list[str]) -> None:
    """A request at the limit passes; a QOS may allow more time than its partition."""
    assert found(*overrides) == []
