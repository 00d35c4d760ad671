"""Heterogeneous jobs: Slurm starts several components together, each with its own partition, nodes, GPUs and ranks.

The request's own keys describe the first component. Each item of `hetjob` describes another component, as the lines
after `#SBATCH hetjob` do in a batch script.
"""

from __future__ import annotations

from dataclasses import replace

from hpcinit.base.errors import RequestError
from hpcinit.config.resources import ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.records.components import Component

ONE, EACH = "one", "each"
COUNTS = {"nodes": 1, "ranks_per_node": 1, "gpus_per_node": 0, "cpus_per_rank": 1}  # key: smallest value
TEXTS = ("partition", "account", "qos")
KEYS = (*COUNTS, "mem_gb", *TEXTS)


def components(config: Config) -> list[Config]:
    """Return one config per component. A job that is not heterogeneous has one component."""
    first = replace(config, hetjob=[])
    return [first, *(replace(first, gpus=None, **each) for each in config.hetjob)]


def worlds(config: Config) -> list[Config]:
    """Return one config per world: one for each component if worlds=each, otherwise just `config`."""
    return components(config) if config.worlds == EACH else [config]


def parts(config: Config) -> tuple[Component, ...]:
    """Return how many nodes and ranks each component has."""
    return tuple(Component(each.nodes, ranks_per_node(each)) for each in components(config))


def refuse(config: Config, command: str) -> None:
    """Raise RequestError if the job is heterogeneous, because `command` works only if all nodes are equal."""
    if config.hetjob:
        raise RequestError(f"{command} does not support heterogeneous jobs (hetjob is set)")
