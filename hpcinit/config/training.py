"""What contradicts itself between layout, batch, model, wrapper and DeepSpeed, known before the queue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from hpcinit.base.errors import RequestError
from hpcinit.config import job_spec
from hpcinit.config.schema import Config, DeepSpeed
from hpcinit.deepspeed.deepspeed_config import options
from hpcinit.records import wrappers
from hpcinit.records.layout import Layout, divisors_around


def problems(config: Config, ranks_per_node: int) -> Iterator[str]:
    """One message per problem."""
    try:
        layout = _layout(config, ranks_per_node)
    except RequestError as error:
        yield str(error)
        return
    wrong = list(_said(lambda: job_spec.samples(config).over(layout.data_parallel)))
    wrapper = wrappers.get(config.parallel.wrap)
    yield from (*wrong, *wrapper.problems(layout), *_model(config, layout))
    if not wrapper.needs_deepspeed:
        yield from _unused(config)
    elif not wrong:  # its numbers are the batch's
        yield from _deepspeed(config, layout)[0]


def warnings(config: Config, ranks_per_node: int) -> Iterator[str]:
    """What is not refused and is worth a look, of a config that has no problem."""
    layout, wrapper = _layout(config, ranks_per_node), wrappers.get(config.parallel.wrap)
    if wrapper.for_many_ranks and layout.pp * layout.ep > 1:
        name = "pp" if layout.pp > 1 else "ep"
        yield (
            f"parallel.{name} is {getattr(layout, name)}: run.mesh has its groups, but run.wrap refuses it; "
            "parallel.wrap=none says that the program does it all"
        )
    if wrapper.needs_deepspeed:
        yield from _deepspeed(config, layout)[1]


def _layout(config: Config, ranks_per_node: int) -> Layout:
    return job_spec.layout(config).over(config.nodes * ranks_per_node, ranks_per_node)


def _said(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except RequestError as error:
        yield str(error)


def _model(config: Config, layout: Layout) -> Iterator[str]:
    """What must divide the heads and the tokens, where they are known."""
    heads, sequence = config.model.heads, config.model.sequence
    ulysses = layout.cp_kind == "ulysses"
    if heads and heads % layout.tp:
        yield f"model.heads {heads} is not a multiple of tp {layout.tp}: {_near('tp', heads, layout.tp)}"
    elif heads and ulysses and (heads // layout.tp) % layout.cp:
        mine = heads // layout.tp
        each = f" / tp {layout.tp} = {mine}" if layout.tp > 1 else ""
        yield (
            f"model.heads {heads}{each} is not a multiple of cp {layout.cp}, and Ulysses divides the heads: "
            f"{_near('cp', mine, layout.cp)}, or parallel.cp_kind=ring"
        )
    pieces = layout.cp * (2 if not ulysses and layout.cp > 1 else 1)
    if sequence and sequence % pieces:
        times = " x 2 (ring)" if pieces > layout.cp else ""
        below = sequence // pieces * pieces
        near = " or ".join(f"model.sequence={n}" for n in (below, below + pieces) if n)
        yield f"model.sequence {sequence} is not a multiple of cp {layout.cp}{times}: {near}"


def _near(name: str, number: int, degree: int) -> str:
    return " or ".join(f"parallel.{name}={each}" for each in divisors_around(number, degree))


def _unused(config: Config) -> Iterator[str]:
    """DeepSpeed's options where DeepSpeed is not used. gradient_clipping follows gradient_clip, which is for all."""
    default = DeepSpeed()
    for key in fields(DeepSpeed):
        value = getattr(config.deepspeed, key.name)
        if key.name != "gradient_clipping" and value != getattr(default, key.name):
            zero = key.name == "zero_stage" and value in {1, 2, 3}
            use = f"parallel=zero{value}" if zero else "parallel.wrap=deepspeed"
            wrap = config.parallel.wrap
            yield f"deepspeed.{key.name} is {value!r}, but parallel.wrap is {wrap}: {use}, or take it out"


def _deepspeed(config: Config, layout: Layout) -> tuple[list[str], list[str]]:
    """Problems and warnings of the ds_config that these options make."""
    from hpcinit.base import versions  # noqa: PLC0415 - for this wrapper only
    from hpcinit.deepspeed import deepspeed_config, deepspeed_versions  # noqa: PLC0415 - for this wrapper only

    try:
        batch = job_spec.samples(config).over(layout.data_parallel)
        asked = job_spec.training(config)
        made, notes = deepspeed_config.build(options(asked.deepspeed), batch, layout, asked.precision)
    except RequestError as error:
        return [str(error)], []
    if _elsewhere(config):
        return [], [*notes, f"cluster.python is {config.cluster.python}: its DeepSpeed is looked at in the job only"]
    found: dict[str, Any] = {name: versions.installed(name) for name in ("deepspeed", "torch")}
    if missing := [name for name, version in found.items() if not version]:
        return [], [
            *notes,
            f"{' and '.join(missing)} not installed here: what the version can do is seen in the job only",
        ]
    return deepspeed_versions.check(made, **found), notes


def _elsewhere(config: Config) -> bool:
    return config.cluster.python not in (None, sys.executable)
