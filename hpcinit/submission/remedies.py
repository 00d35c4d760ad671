"""What would make a request fit: each change is tried, and what is named has been computed to fit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from hpcinit.config import checks
from hpcinit.config.schema import Config
from hpcinit.facts import memory, wrappers
from hpcinit.facts.errors import RequestError
from hpcinit.submission import estimate

GB = 10**9
MOST_NODES = 4096  # beyond it no advice


def remedies(config: Config) -> list[str]:
    """'deepspeed.zero_stage=3: GPU 40.2 GB', a line for each change that fits alone; the fewest nodes."""
    found = [said for changes in _changes(config) if (said := _tried(config, changes))]
    nodes = config.nodes * 2
    while nodes <= MOST_NODES:
        if said := _tried(config, {"nodes": nodes}):
            return [*found, said]
        nodes *= 2
    return found


def _changes(config: Config) -> Iterator[Mapping[str, Any]]:
    yield from wrappers.get(config.parallel.wrap).with_less_memory(config.deepspeed.zero_stage)
    if config.precision.param == "fp32":
        yield {"precision.param": "bf16"}
    if config.activation_checkpointing == "none" and config.model.layers:
        yield {"activation_checkpointing": "full"}
    if (config.batch.micro or 1) > 1 and config.batch.total is None:
        yield {"batch.micro": 1}
    per_node = checks.ranks_per_node(config)
    for tp in (2, 4, 8):
        if tp > config.parallel.tp and per_node % tp == 0:
            yield {"parallel.tp": tp}


def _tried(config: Config, changes: Mapping[str, Any]) -> str | None:
    changed = copy.deepcopy(config)
    for key, value in changes.items():
        *groups, last = key.split(".")
        place: Any = changed
        for group in groups:
            place = getattr(place, group)
        setattr(place, last, value)
    different = {key: value for key, value in changes.items() if value != _get(config, key)}
    try:
        found = estimate.of(changed)
    except RequestError:  # a layout or batch that is none
        return None
    if not found.fits or not different:
        return None
    cpu = f", CPU {found.totals[memory.CPU] / GB:.1f} GB a node" if found.totals[memory.CPU] else ""
    words = " ".join(f"{key}={value}" for key, value in different.items())
    return f"{words}: GPU {found.totals[memory.GPU] / GB:.1f} GB{cpu}"


def _get(config: Config, key: str) -> object:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
