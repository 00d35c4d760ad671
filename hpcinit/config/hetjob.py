"""Heterogeneous jobs: components with their own partition, nodes, devices and ranks, which Slurm starts together.

The keys of the request describe the first component. Each item of `hetjob` describes a further one, as the lines after
`#SBATCH hetjob` do in a batch script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hpcinit.base.errors import RequestError
from hpcinit.config.resources import ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.records.components import Component

ONE, EACH = "one", "each"
COUNTS = {"nodes": 1, "ranks_per_node": 1, "gpus_per_node": 0, "cpus_per_rank": 1}  # with their least value
TEXTS = ("partition", "account", "qos")
KEYS = (*COUNTS, "mem_gb", *TEXTS)


def components(config: Config) -> list[Config]:
    """Return the config of each component. One is the whole job if it is not heterogeneous."""
    first = replace(config, hetjob=[])
    return [first, *(replace(first, gpus=None, **each) for each in config.hetjob)]


def worlds(config: Config) -> list[Config]:
    """Return a config for each world: `config` itself, or its components with worlds=each."""
    return components(config) if config.worlds == EACH else [config]


def parts(config: Config) -> tuple[Component, ...]:
    """Return nodes and ranks of each component."""
    return tuple(Component(each.nodes, ranks_per_node(each)) for each in components(config))


def refuse(config: Config, command: str) -> None:
    """Raise RequestError for a command that needs equal nodes."""
    if config.hetjob:
        raise RequestError(f"{command} does not support heterogeneous jobs (hetjob is set)")


def problems(config: Config, of_one: Callable[[Config], Iterator[str]]) -> Iterator[str]:
    """Yield the problems of `hetjob`. of_one: the checks of the request of each component."""
    if not config.hetjob:
        if config.worlds != ONE:
            yield f"worlds is {config.worlds}, but hetjob is empty: remove worlds, or add components"
        return
    for key, value, usual in (
        ("cluster.engine", config.cluster.engine, "slurm"),
        ("launch.kind", config.launch.kind, "srun"),
        ("spare_nodes", config.spare_nodes, 0),
        ("chain", config.chain, 1),
        ("restart.max_restarts", config.restart.max_restarts or 0, 0),
    ):
        if value != usual:
            yield f"hetjob is set and {key} is {value}, expected {usual}: a heterogeneous job cannot have it"
    wrong = [text for at, each in enumerate(config.hetjob) for text in _values(at, dict(each))]
    yield from wrong
    if not wrong:
        for at, each in enumerate(components(config)[1:]):
            yield from (f"hetjob[{at}]: {text}" for text in of_one(each))


def _values(at: int, each: dict[str, object]) -> Iterator[str]:
    for key, value in each.items():
        name = f"hetjob[{at}].{key}"
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key not in KEYS:
            yield f"{name} is not a key of a component, expected one of: {', '.join(KEYS)}"
        elif key in COUNTS and (type(value) is not int or value < COUNTS[key]):
            yield f"{name} is {value!r}, expected a whole number, {COUNTS[key]} or more"
        elif key == "mem_gb" and not (number and value >= 0):  # type: ignore[operator]
            yield f"{name} is {value!r}, expected a number, 0 or more"
        elif key in TEXTS and (not isinstance(value, str) or not value):
            yield f"{name} is {value!r}, expected a name"
