"""From the config's parallel, batch, precision and deepspeed keys to the facts' values."""

from __future__ import annotations

from dataclasses import asdict

from hpcinit.config.schema import Config
from hpcinit.facts.layout import Layout
from hpcinit.facts.spec import Precision, Samples, Training
from hpcinit.facts.wrappers import WRAPPERS


def layout(config: Config) -> Layout:
    """As it was written: a degree may be -1. Raises RequestError."""
    p = config.parallel
    return Layout(p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp, p.ep, p.cp_kind, p.tp_across_nodes)


def samples(config: Config) -> Samples:
    return Samples(config.batch.micro, config.batch.accumulation, config.batch.total)


def training(config: Config) -> Training:
    """Raises SpecError for a word that is none of the choices."""
    return Training(
        wrap=config.parallel.wrap,
        precision=Precision(config.precision.param, config.precision.reduce),
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
        gradient_clip=config.gradient_clip,
        deepspeed=asdict(config.deepspeed),
    )


def needs_deepspeed(config: Config) -> bool:
    """Return whether the ranks start DeepSpeed. A wrapper that does not exist, which the checks refuse, needs none."""
    wrapper = WRAPPERS.get(config.parallel.wrap)
    return config.comm.deepspeed or (wrapper is not None and wrapper.needs_deepspeed)
