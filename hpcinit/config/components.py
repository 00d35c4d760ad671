"""Heterogeneous jobs: components with their own partition, nodes, devices and ranks, which Slurm starts together.

The keys of the request describe the first component; `components` lists what is different in each further one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from hpcinit.config.resources import ranks_per_node
from hpcinit.config.schema import Config

ONE, EACH = "one", "each"
WHOLE = ("nodes", "ranks_per_node", "gpus_per_node", "cpus_per_rank")
KEYS = (*WHOLE, "mem_gb", "partition")


def of(config: Config) -> list[Config]:
    """Return the config of each component, of which the first has the keys of the request."""
    first = replace(config, components=[])
    return [first, *(replace(first, gpus=None, **each) for each in config.components)]


def one_world(config: Config) -> bool:
    """Return whether the ranks of several components form one world."""
    return bool(config.components) and config.worlds == ONE


def nodes(config: Config) -> int:
    """Return the nodes of the world of the first component."""
    return sum(each.nodes for each in of(config)) if one_world(config) else config.nodes


def ranks(config: Config) -> int:
    """Return the ranks of the world of the first component."""
    found = of(config) if one_world(config) else [config]
    return sum(each.nodes * ranks_per_node(each) for each in found)


def ranks_in_a_row(config: Config) -> int:
    """Return how many consecutive ranks, counted from any multiple of the number, are on one node."""
    return math.gcd(*(ranks_per_node(each) for each in (of(config) if one_world(config) else [config])))


def shape(config: Config) -> str:
    """Return '2 nodes x 4 ranks', and the same for each further component: '2 nodes x 4 ranks + 1 node x 1 rank'."""
    sizes = [(each.nodes, ranks_per_node(each)) for each in of(config)]
    return " + ".join(f"{nodes} node{'s' * (nodes != 1)} x {ranks} rank{'s' * (ranks != 1)}" for nodes, ranks in sizes)


def problems(config: Config, of_one: Callable[[Config], Iterator[str]]) -> Iterator[str]:
    """Yield the problems of `components`. of_one: the checks of the request of each component."""
    if not config.components:
        return
    wrong = [text for at, each in enumerate(config.components, 1) for text in _values(at, dict(each))]
    yield from wrong
    for key, value, usual in (
        ("cluster.engine", config.cluster.engine, "slurm"),
        ("launch.kind", config.launch.kind, "srun"),
        ("spare_nodes", config.spare_nodes, 0),
        ("restart.max_restarts", config.restart.max_restarts or 0, 0),
    ):
        if value != usual:
            yield f"components are set and {key} is {value}: a heterogeneous job needs {key}={usual}"
    if not wrong:
        for at, each in enumerate(of(config)[1:], 1):
            yield from (f"components[{at - 1}]: {text}" for text in of_one(each))


def _values(at: int, each: dict[str, object]) -> Iterator[str]:
    for key, value in each.items():
        name = f"components[{at - 1}].{key}"
        if key not in KEYS:
            yield f"{name} is no key of a component, expected one of: {', '.join(KEYS)}"
        elif key in WHOLE and (type(value) is not int or value < (key != "gpus_per_node")):
            yield f"{name} is {value!r}, expected a whole number, {int(key != 'gpus_per_node')} or more"
        elif key == "mem_gb" and (not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0):
            yield f"{name} is {value!r}, expected a number, 0 or more"
        elif key == "partition" and (not isinstance(value, str) or not value):
            yield f"{name} is {value!r}, expected the name of a partition"
