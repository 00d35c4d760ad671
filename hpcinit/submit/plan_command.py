"""`hpcinit plan cluster=x nodes=8 parallel=zero3 model.params=7e9`: estimate the memory per rank.

Exit status: 0 if it fits, 1 if it does not, 2 for a wrong request or if the cluster file has no GPU memory.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hpcinit.base import console, json_output
from hpcinit.base.errors import ConfigError, RequestError
from hpcinit.config import checks, compose, hetjob, job_spec, resources
from hpcinit.config.request import Request
from hpcinit.config.schema import Config
from hpcinit.records import memory, wrappers
from hpcinit.records.layout import Layout
from hpcinit.records.memory import BYTES, Demand, Part, Zero

# Activation memory per rank, for a transformer.
#
# Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models (arXiv:2205.05198), section 4,
# in 16 bit: s tokens, b samples, h hidden, a heads, t tensor parallel ranks. A layer needs s*b*h*(10 + 24/t +
# 5*a*s/(h*t)) bytes (equation 2; 34 + 5*a*s/h with t = 1). The last term is the attention scores, which flash
# attention does not keep. Full checkpointing keeps each layer's input, 2*s*b*h, and all of the current layer.


@dataclass(frozen=True)
class Transformer:
    """heads: None with flash attention, which never stores the scores. micro: samples of a forward pass."""

    layers: int
    hidden: int
    sequence: int
    micro: int
    heads: int | None = None


def activation_memory(model: Transformer, layout: Layout, param: str, checkpointing: bool) -> int:
    """Return the bytes on one rank, without embedding and logits.

    cp divides the sequence. With pp (1F1B) the first stage keeps one micro batch per stage, so all layers count. fp32
    doubles the result, including the few one-byte masks.
    """
    samples = model.sequence // layout.cp * model.micro * model.hidden  # s*b*h
    scores = 5 * model.heads * model.sequence / (model.hidden * layout.tp) if model.heads else 0
    layer = samples * (10 + 24 / layout.tp + scores)
    kept = 2 * samples * model.layers + layer if checkpointing else layer * model.layers
    return int(kept * BYTES[param] / 2)


# The estimate for a config, compared with the memory of its cluster.

GB = 10**9
# An assumption: CUDA's context and NCCL's buffers need one to two GB, and torch's allocator loses some to fragments.
CONTEXT, FRAGMENTS = 2 * GB, 0.05
# Keys of zero_optimization in the user's ds_config that affect memory.
SIZES = {
    "reduce_bucket_size": "reduce_bucket",
    "stage3_max_live_parameters": "live",
    "stage3_prefetch_bucket_size": "prefetch",
    "sub_group_size": "sub_group",
}


@dataclass(frozen=True)
class Estimate:
    """totals: bytes on a rank's GPU, and on a node's CPU and NVMe. limits: the available bytes, as far as known.

    fits: None if a limit is missing, see why_unknown. unknown: one line for each part that is not counted.
    """

    parts: Sequence[Part]
    totals: Mapping[str, int]
    limits: Mapping[str, float]
    ranks_per_node: int
    unknown: Sequence[str]

    @property
    def margin(self) -> float:
        """The bytes of a GPU that the model cannot use."""
        limit = self.limits.get(memory.GPU)
        return 0 if limit is None else CONTEXT + FRAGMENTS * limit

    @property
    def fits(self) -> bool | None:
        for place, limit in self.limits.items():
            if self.totals[place] > limit - (self.margin if place == memory.GPU else 0):
                return False
        return True if memory.GPU in self.limits else None

    @property
    def why_unknown(self) -> str:
        return "cluster.gpu_mem_gb is not set: set it to the memory of a GPU of this cluster"


def estimate_memory(config: Config) -> Estimate:
    """Return the memory that a config needs. Raise RequestError if it cannot be estimated."""
    hetjob.refuse(config, "hpcinit plan")
    demand = demand_of(config)
    wrapper, unknown = wrappers.get(demand.wrap), []
    parts = [*wrapper.memory(demand)]
    if found := _activations(config, demand.layout):
        parts.append(found)
    else:
        unknown.append(f"activations: set {', '.join(_missing(config))}")
    unknown.extend(wrapper.not_counted(demand))
    if demand.layout.ep > 1:
        unknown.append("ep: every parameter counts as shared by all ranks, so experts need less than shown")
    per_node = checks.ranks_per_node(config)
    totals = {place: memory.total(parts, place) for place in (memory.GPU, memory.CPU, memory.NVME)}
    totals = {place: size if place == memory.GPU else size * per_node for place, size in totals.items()}
    limits = {memory.GPU: config.cluster.gpu_mem_gb, memory.CPU: resources.mem_gb(config) or None}
    if totals[memory.CPU] and limits[memory.CPU] is None:
        unknown.append("whether the node's memory is enough: set mem_gb")
    if totals[memory.NVME]:
        unknown.append(f"whether {config.deepspeed.nvme_path or 'deepspeed.nvme_path'} has enough space on every node")
    return Estimate(parts, totals, {k: v * GB for k, v in limits.items() if v is not None}, per_node, unknown)


def demand_of(config: Config) -> Demand:
    """Return the part of a config that determines its memory. Raise RequestError."""
    if config.model.params is None:
        raise RequestError("model.params is not set, expected the number of parameters, as in model.params=7e9")
    per_node = checks.ranks_per_node(config)
    own = config.deepspeed.optimizer
    return Demand(
        parameters=int(config.model.params),
        layout=job_spec.layout(config).over(config.nodes * per_node, per_node),
        wrap=config.parallel.wrap,
        param=config.precision.param,
        reduce=config.precision.reduce,
        optimizer="muon" if own == "muon" else "adamw",
        fused=wrappers.get(config.parallel.wrap).needs_deepspeed and own == "adamw",
        layers=config.model.layers,
        zero=_zero(config),
    )


def _zero(config: Config) -> Zero:
    given = config.deepspeed
    written: Any = given.ds_config.get("zero_optimization", {})
    found = {
        ours: int(written[theirs]) for theirs, ours in SIZES.items() if isinstance(written.get(theirs), int | float)
    }
    return Zero(given.zero_stage, given.offload_param, given.offload_optimizer, given.hpz, given.overlap_comm, **found)


def _missing(config: Config) -> list[str]:
    keys = {"model.layers": config.model.layers, "model.hidden": config.model.hidden}
    keys |= {"model.sequence": config.model.sequence}
    return [key for key, value in keys.items() if not value]


def _activations(config: Config, layout: Layout) -> Part | None:
    model = config.model
    if not (model.layers and model.hidden and model.sequence):
        return None
    micro = job_spec.samples(config).over(layout.dp_replicate * layout.dp_shard).micro
    full = config.activation_checkpointing == "full"
    shape = Transformer(model.layers, model.hidden, model.sequence, micro)
    size = activation_memory(shape, layout, config.precision.param, full)
    how = f"{'full' if full else 'no'} checkpointing, flash attention, without logits"
    return Part("activations", size, how, during=memory.PASS)


# Advice for a request that does not fit: each proposed change was estimated and fits.

MOST_NODES = 4096  # more nodes are not proposed


def remedies(config: Config) -> list[str]:
    """Return a line for each single change that fits, such as 'deepspeed.zero_stage=3: GPU 40.2 GB'.

    The last line has the smallest number of nodes that fits.
    """
    found = [line for changes in _changes(config) if (line := _try(config, changes))]
    nodes = config.nodes * 2
    while nodes <= MOST_NODES:
        if line := _try(config, {"nodes": nodes}):
            return [*found, line]
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


def _try(config: Config, changes: Mapping[str, Any]) -> str | None:
    changed = copy.deepcopy(config)
    for key, value in changes.items():
        *groups, last = key.split(".")
        place: Any = changed
        for group in groups:
            place = getattr(place, group)
        setattr(place, last, value)
    different = {key: value for key, value in changes.items() if value != _get(config, key)}
    try:
        found = estimate_memory(changed)
    except RequestError:  # an impossible layout or batch
        return None
    if not found.fits or not different:
        return None
    cpu = f", CPU {found.totals[memory.CPU] / GB:.1f} GB per node" if found.totals[memory.CPU] else ""
    overrides = " ".join(f"{key}={value}" for key, value in different.items())
    return f"{overrides}: GPU {found.totals[memory.GPU] / GB:.1f} GB{cpu}"


def _get(config: Config, key: str) -> object:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


PLACES = {memory.GPU: "GPU, per rank", memory.CPU: "CPU, per node", memory.NVME: "NVMe, per node"}
VERDICTS = {True: "fits", False: "does not fit", None: "unknown"}
STYLES = {True: "green", False: "bold red", None: "yellow"}
STATUS = {True: 0, False: 1, None: 2}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit plan",
        usage="hpcinit plan [KEY=VALUE ...] [--json] [-q | -v]",
        description=__doc__,
        epilog="KEY=VALUE and flags such as --multirun are those of hpcinit submit; its --help shows every key.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return console.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    """Run `hpcinit plan`. argv: as for `hpcinit submit`, and --json. Raise RequestError."""
    if "--" in argv:
        raise RequestError("plan got -- and a program, but it runs none: remove them, or use hpcinit submit")
    options, arguments = console.parse_known_arguments(parser(), list(argv))
    return compose.main(arguments, _check, lambda requests: _show_all(requests, options.json))


def _check(request: Request) -> None:
    if problems := checks.problems(request.config, to_submit=False):
        raise ConfigError(*problems)
    estimate_memory(request.config)  # an error must appear before the first table of a sweep


def _show_all(requests: Sequence[Request], as_json: bool) -> int:
    status = 0
    for request in requests:
        found = estimate_memory(request.config)
        advice = remedies(request.config) if found.fits is False else []
        if as_json:
            fields = {"combination": request.combination, **_document(request.config, found, advice)}
            print(json_output.line("plan", fields))
        elif console.quiet():
            print(verdict(found))
        else:
            _show(request, found, advice)
        status = max(status, STATUS[found.fits])
    return status


def equations(config: Config) -> list[str]:
    """Return the equations of the layout and of the batch. Raise RequestError."""
    per_node = checks.ranks_per_node(config)
    world_size = config.nodes * per_node
    layout = job_spec.layout(config).over(world_size, per_node)
    product = " x ".join(f"{name} {degree}" for name, degree in layout.degrees().items() if degree > 1) or "1"
    batch = job_spec.samples(config).over(layout.dp_replicate * layout.dp_shard)
    return [
        f"nodes {config.nodes} x ranks per node {per_node} = {world_size} ranks = {product}",
        f"{batch.equation()} samples per step",
    ]


def _document(config: Config, found: Estimate, advice: Sequence[str]) -> dict[str, Any]:
    return {
        "equations": equations(config),
        "parts": [vars(part) for part in found.parts],
        "bytes": found.totals,
        "limits": found.limits,
        "margin": found.margin,
        "verdict": VERDICTS[found.fits],
        "unknown": found.unknown,
        "would_fit": list(advice),
    }


def _show(request: Request, found: Estimate, advice: Sequence[str]) -> None:
    out = Console(highlight=False, soft_wrap=True, color_system=console.color_system())
    for line in [request.combination, *equations(request.config)]:
        if line:
            out.print(line, markup=False)
    out.print(_table(found))
    out.print(verdict(found), markup=False, style=STYLES[found.fits])
    for line in found.unknown:
        out.print(f"not counted: {line}", markup=False)
    if found.fits is False:
        out.print(
            "each of these changes makes it fit:" if advice else "none of the single changes we tried makes it fit"
        )
    for line in advice:
        out.print(f"  {line}", markup=False)


def _table(found: Estimate) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("where", "what", "when", "how"):
        table.add_column(name, overflow="fold")
    table.add_column("GB", justify="right", no_wrap=True)
    for place, title in PLACES.items():
        here = [part for part in found.parts if part.place == place]
        times = 1 if place == memory.GPU else found.ranks_per_node
        for part in here:
            how = part.how + (f" x {times} ranks" if times > 1 else "")
            table.add_row(title, part.name, part.during, how, f"{part.bytes * times / GB:.2f}")
        if here:
            table.add_row(title, "at most", "", "always + the larger of pass, step", f"{found.totals[place] / GB:.2f}")
    return table


def verdict(found: Estimate) -> str:
    """Return 'does not fit: GPU, per rank needs 112.0 GB of 74.0 GB (80 GB - 6.0 GB for ...)'."""
    parts = []
    for place, title in PLACES.items():
        limit, needs = found.limits.get(place), found.totals[place]
        if limit is None:
            continue
        margin = (
            f" ({limit / GB:.0f} GB - {found.margin / GB:.1f} GB for CUDA, NCCL and fragmentation: "
            f"{math.floor(100 * FRAGMENTS)} % + {CONTEXT / GB:.0f} GB, an assumption)"
        )
        usable = limit - (found.margin if place == memory.GPU else 0)
        parts.append(
            f"{title} needs {needs / GB:.1f} GB of {usable / GB:.1f} GB" + (margin if place == memory.GPU else "")
        )
    if found.fits is None:
        parts.append(found.why_unknown)
    counted = " (counted parts only)" if found.fits and found.unknown else ""
    return f"{VERDICTS[found.fits]}{counted}: {'; '.join(parts)}"
