"""Checks, before the job is queued, that layout, batch, model, wrapper and DeepSpeed options fit together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields

from hpcinit.base import versions
from hpcinit.base.errors import RequestError
from hpcinit.checks import python_environment
from hpcinit.config import hetjob, job_spec
from hpcinit.config.schema import Config
from hpcinit.deepspeed import deepspeed_config, deepspeed_versions
from hpcinit.deepspeed.deepspeed_config import options
from hpcinit.deepspeed.deepspeed_keys import DeepSpeed
from hpcinit.records import wrappers
from hpcinit.records.layout import Layout, divisors_around
from hpcinit.world import network


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each problem with the host names, the start-up timeout, or the options of a training run."""
    for check in (
        lambda: network.rename_host("node", config.cluster.host_template),
        lambda: job_spec.startup_timeout(config),
    ):
        yield from _error(check)
    for world in hetjob.worlds(config):
        yield from _world(world)


def _world(config: Config) -> Iterator[str]:
    try:
        layout = job_spec.full_layout(config)
    except RequestError as error:
        yield str(error)
        return
    wrong = list(_error(lambda: job_spec.samples(config).over(layout.data_parallel)))
    wrapper = wrappers.get(config.parallel.wrap)
    yield from (*wrong, *wrapper.problems(layout), *_model(config, layout), *_deepspeed_version(config))
    if not wrapper.needs_deepspeed:
        yield from _unused(config)
    elif not wrong:  # a ds_config needs valid batch sizes
        yield from _deepspeed(config, layout)[0]


def warnings(config: Config) -> Iterator[str]:
    """Yield warnings about a config that has no problems."""
    layout, wrapper = job_spec.full_layout(config), wrappers.get(config.parallel.wrap)
    if wrapper.for_many_ranks and layout.pp * layout.ep > 1:
        name = "pp" if layout.pp > 1 else "ep"
        yield (
            f"parallel.{name} is {getattr(layout, name)}, but run.wrap() does not implement it; if the program "
            "implements it with the groups of run.mesh, set parallel.wrap=none"
        )
    if wrapper.needs_deepspeed:
        yield from _deepspeed(config, layout)[1]
    limit_s, after_s = config.comm.collective_timeout_s, config.hang.after_s
    if limit_s is not None and 0 < limit_s < after_s:
        yield (
            f"comm.collective_timeout_s is {limit_s:g} and hang.after_s is {after_s:g}: a collective times out before "
            "hpcinit detects the hang, and the error of a timeout does not name the missing rank; set hang.after_s "
            f"below {limit_s:g}, or increase comm.collective_timeout_s"
        )


def _error(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except RequestError as error:
        yield str(error)


def _model(config: Config, layout: Layout) -> Iterator[str]:
    """Yield a message if the parallel degrees do not divide model.heads or model.sequence."""
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
    """Yield a message for each DeepSpeed option that is set although parallel.wrap is not deepspeed.

    gradient_clipping is skipped, because it is a copy of gradient_clip.
    """
    default = DeepSpeed()
    for key in fields(DeepSpeed):
        value = getattr(config.deepspeed, key.name)
        if key.name != "gradient_clipping" and value != getattr(default, key.name):
            zero = key.name == "zero_stage" and value in {1, 2, 3}
            use = f"parallel=zero{value}" if zero else "parallel.wrap=deepspeed"
            wrap = config.parallel.wrap
            yield f"deepspeed.{key.name} is {value!r}, but parallel.wrap is {wrap}: set {use}, or remove it"


def _deepspeed_version(config: Config) -> Iterator[str]:
    found = _deepspeed_of_ranks(config) if job_spec.uses_deepspeed(config) else ""
    if found and (wrong := deepspeed_versions.too_old(found)):
        yield f"{wrong}: {deepspeed_versions.UPDATE}"


def _deepspeed_of_ranks(config: Config) -> str:
    """Return the DeepSpeed version in the ranks' environment, or '' if it is not visible from this machine.

    Only files are read.
    """
    cluster = config.cluster
    if config.container.image:
        return ""
    if cluster.python != sys.executable and (prefix := python_environment.ranks_prefix(cluster, os.environ)):
        folders = python_environment.search_path(prefix, os.environ)
        return versions.by_folder(tuple(map(str, folders))).get("deepspeed", "")
    return "" if cluster.conda or cluster.python not in (None, sys.executable) else versions.installed("deepspeed")


def _deepspeed(config: Config, layout: Layout) -> tuple[list[str], list[str]]:
    """Return the problems and the warnings about the ds_config that hpcinit builds from the options."""
    try:
        batch = job_spec.samples(config).over(layout.data_parallel)
        requested = job_spec.training(config)
        made, notes = deepspeed_config.build(options(requested.deepspeed), batch, layout, requested.precision)
    except RequestError as error:
        return [str(error)], []
    if not (found := _deepspeed_of_ranks(config)):
        return [], [*notes, "DeepSpeed was not found here: its version is checked only in the job"]
    return deepspeed_versions.check(made, found), notes
