"""Heterogeneous jobs: components with their own partition, nodes, devices and ranks, which Slurm starts together.

The keys of the request describe the first component. Each item of `hetjob` describes a further one, as the lines after
`#SBATCH hetjob` do in a batch script.
"""

from __future__ import annotations

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
    """Return the config of each component. A job that is not heterogeneous has one."""
    first = replace(config, hetjob=[])
    return [first, *(replace(first, gpus=None, **each) for each in config.hetjob)]


def worlds(config: Config) -> list[Config]:
    """Return a config for each world: `config` itself, or its components with worlds=each."""
    return components(config) if config.worlds == EACH else [config]


def parts(config: Config) -> tuple[Component, ...]:
    """Return the nodes and ranks of each component."""
    return tuple(Component(each.nodes, ranks_per_node(each)) for each in components(config))


def refuse(config: Config, command: str) -> None:
    """Raise RequestError for a command that works only with equal nodes."""
    if config.hetjob:
        raise RequestError(f"{command} does not support heterogeneous jobs (hetjob is set)")
