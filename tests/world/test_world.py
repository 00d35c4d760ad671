"""The values of a World are consistent; its exports."""

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
        ({"local_world_size": 5}, "local_world_size 5 is more than world_size 4 (launcher: slurm)"),
        ({"node_rank": 2}, "node_rank is 2, expected 0 to 1 (number of hosts is 2)"),
        (
            {"master_ports": ()},
            "no port for the rendezvous: master_ports is empty, expected at least one",
        ),
    ],
)
def test_a_world_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    """Contradicting values are refused, and the message has both."""
    with pytest.raises(WorldError) as caught:
        replace(SMALL, **changes)
    assert str(caught.value) == message


def test_nodes_and_host() -> None:
    """The number of nodes is that of the hosts, else the launcher's count, else from the sizes; an unnamed host is ''."""
    assert (SMALL.nodes, SMALL.host) == (2, "n2")
    nameless = replace(SMALL, hosts=())
    assert (nameless.nodes, nameless.host) == (2, "")
    assert replace(nameless, node_count=3).nodes == 3


def test_exports() -> None:
    """The exports are torch's variables, and one that marks them as hpcinit's."""
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
    """A variable that is not a number is an error with advice."""
    assert number({"A": "7"}, "A", "x") == 7
    with pytest.raises(WorldError, match=r"^A is not set, expected a number: start it with srun$"):
        number({}, "A", "start it with srun")
    with pytest.raises(WorldError, match=r"^A is 'x', expected a number: start it with srun$"):
        number({"A": "x"}, "A", "start it with srun")
