"""A World that exists is consistent, and what it exports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcinit.base.errors import WorldError
from hpcinit.world import World, exports, number

SMALL = World("slurm", 2, 4, 0, 2, 1, ("n1", "n2"), "n1", (20000, 20001), "6.0.0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 4}, "rank is 4, expected 0 to 3 (world_size is 4)"),
        ({"rank": -1}, "rank is -1, expected 0 to 3 (world_size is 4)"),
        ({"local_rank": 2}, "local_rank is 2, expected 0 to 1 (local_world_size is 2)"),
        ({"local_world_size": 5}, "local_world_size 5 is more than world_size 4, as read from slurm"),
        ({"node_rank": 2}, "node_rank is 2, expected 0 to 1 (number of hosts is 2)"),
        ({"master_ports": ()}, "no port to meet at: master_ports is empty"),
    ],
)
def test_a_world_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    """Values that cannot be true together make no World, and the message has both."""
    with pytest.raises(WorldError) as caught:
        replace(SMALL, **changes)
    assert str(caught.value) == message


def test_nodes_and_host() -> None:
    """Nodes are named, or counted by the launcher, or follow from the sizes; a host without a name is ''."""
    assert (SMALL.nodes, SMALL.host) == (2, "n2")
    nameless = replace(SMALL, hosts=())
    assert (nameless.nodes, nameless.host) == (2, "")
    assert replace(nameless, node_count=3).nodes == 3


def test_exports() -> None:
    """torch's names, and the one by which hpcinit knows them again."""
    assert exports(SMALL) == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "20000",
        "HPCINIT_WORLD": "6.0.0",
    }


def test_number() -> None:
    """A variable that is no number is an error that says what to do."""
    assert number({"A": "7"}, "A", "x") == 7
    with pytest.raises(WorldError, match=r"^A is not set, expected a number: start it with srun$"):
        number({}, "A", "start it with srun")
    with pytest.raises(WorldError, match=r"^A is 'x', expected a number: start it with srun$"):
        number({"A": "x"}, "A", "start it with srun")
