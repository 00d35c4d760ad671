"""`hpcinit plan cluster=x nodes=8 parallel=zero3 model.params=7e9`: estimates the memory per rank.

Exit status: 0 if the model fits, 1 if it does not, 2 if the request is wrong or cluster.gpu_mem_gb is not set.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hpcinit.base import console, json_output
from hpcinit.base.errors import ConfigError, RequestError
from hpcinit.checks import all_checks
from hpcinit.config import compose, hetjob, job_spec, resources
from hpcinit.config.request import Request
from hpcinit.config.schema import Config
from hpcinit.records import memory, wrappers
from hpcinit.records.layout import Layout
from hpcinit.records.memory import BYTES, Demand, Part, Zero

# Activation memory per rank, for a transformer.
#
# Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models (arXiv:2205.05198), section 4.
# s is the sequence length, b the samples, h the hidden size, a the heads, t the tensor parallel ranks. With 16 bits, a
# layer needs s*b*h*(10 + 24/t + 5*a*s/(h*t)) bytes (equation 2). The last term is the attention scores, which flash
# attention does not keep. Full checkpointing keeps each layer's input, 2*s*b*h bytes, and all of the current layer.


def activation_memory(
    layers: int, hidden: int, sequence: int, micro: int, layout: Layout, param: str, checkpointing: bool, heads: int = 0
) -> int:
    """Return how many bytes of activations one rank keeps, without embedding and logits.

    Pipeline parallelism does not reduce the result: with the schedule 1F1B, the first stage keeps one micro batch per
    stage.

    micro: samples per forward pass.
    heads: the number of attention heads, or 0 with flash attention, which never stores the scores.
    """
    samples = sequence // layout.cp * micro * hidden  # s*b*h
    layer = samples * (10 + 24 / layout.tp + 5 * heads * sequence / (hidden * layout.tp))
    kept = 2 * samples * layers + layer if checkpointing else layer * layers
    return int(kept * BYTES[param] / 2)


# The estimate for a config, compared with the memory of its cluster.

GB = 10**9
# We assume that CUDA's context and NCCL's buffers need 2 GB, and that torch's allocator loses 5 % to fragments.
CONTEXT, FRAGMENTS = 2 * GB, 0.05
# Keys of zero_optimization in the user's ds_config that affect memory.
SIZES = ("reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size", "sub_group_size")


@dataclass(frozen=True)
class Estimate:
    """How much memory a rank needs, and how much is available.

    totals: the bytes that are needed: GPU memory per rank, CPU memory and NVMe per node.
    limits: the available bytes of each kind of memory that the config describes.
    fits: whether enough memory is available. None if the config does not give the GPU's memory.
    unknown: one line for each part that is not included in the estimate.
    """

    parts: Sequence[Part]
    totals: Mapping[str, int]
    limits: Mapping[str, float]
    ranks_per_node: int
    unknown: Sequence[str]

    @property
    def margin(self) -> float:
        """Return how many bytes of a GPU are not available to the model."""
        limit = self.limits.get(memory.GPU)
        return 0 if limit is None else CONTEXT + FRAGMENTS * limit

    @property
    def fits(self) -> bool | None:
        for place, limit in self.limits.items():
            if self.totals[place] > limit - (self.margin if place == memory.GPU else 0):
                return False
        return True if memory.GPU in self.limits else None


def estimate_memory(config: Config) -> Estimate:
    """Return how much memory this config needs. Raise RequestError if that cannot be estimated."""
    hetjob.refuse(config, "hpcinit plan")
    demand = demand_of(config)
    wrapper, unknown = wrappers.get(demand.wrap), []
    parts = [*wrapper.memory(demand)]
    shape = {name: getattr(config.model, name) for name in ("layers", "hidden", "sequence")}
    if missing := [f"model.{name}" for name, value in shape.items() if not value]:
        unknown.append(f"activations: set {', '.join(missing)}")
    else:
        micro = job_spec.samples(config).over(demand.layout.dp_replicate * demand.layout.dp_shard).micro
        full = config.activation_checkpointing == "full"
        layers, hidden, sequence = shape.values()
        size = activation_memory(layers, hidden, sequence, micro, demand.layout, demand.param, full)
        how = f"{'full' if full else 'no'} checkpointing, flash attention, without logits"
        parts.append(Part("activations", size, how, during=memory.PASS))
    unknown.extend(wrapper.not_counted(demand))
    if demand.layout.ep > 1:
        unknown.append("ep: the table counts each parameter on all ranks, so experts need less memory than shown")
    per_node = resources.ranks_per_node(config)
    totals = {place: memory.total(parts, place) for place in (memory.GPU, memory.CPU, memory.NVME)}
    totals = {place: size if place == memory.GPU else size * per_node for place, size in totals.items()}
    limits = {memory.GPU: config.cluster.gpu_mem_gb, memory.CPU: resources.mem_gb(config) or None}
    if totals[memory.CPU] and limits[memory.CPU] is None:
        unknown.append("the memory of a node: set mem_gb to compare with it")
    if totals[memory.NVME]:
        unknown.append(f"the free space of {config.deepspeed.nvme_path or 'deepspeed.nvme_path'} on the nodes")
    return Estimate(parts, totals, {k: v * GB for k, v in limits.items() if v is not None}, per_node, unknown)


def demand_of(config: Config) -> Demand:
    """Return the settings in the config that determine how much memory the run needs.

    Raise RequestError if model.params is not set, or if the layout does not fit the number of ranks.
    """
    if config.model.params is None:
        raise RequestError("model.params is not set, expected the number of parameters, as in model.params=7e9")
    per_node = resources.ranks_per_node(config)
    given = config.deepspeed
    written: Any = given.ds_config.get("zero_optimization", {})
    sizes = {name: int(written[name]) for name in SIZES if isinstance(written.get(name), int | float)}
    zero = Zero(given.zero_stage, given.offload_param, given.offload_optimizer, given.hpz, given.overlap_comm, **sizes)
    return Demand(
        parameters=int(config.model.params),
        layout=job_spec.layout(config).over(config.nodes * per_node, per_node),
        wrap=config.parallel.wrap,
        param=config.precision.param,
        reduce=config.precision.reduce,
        optimizer="muon" if given.optimizer == "muon" else "adamw",
        fused=wrappers.get(config.parallel.wrap).needs_deepspeed and given.optimizer == "adamw",
        layers=config.model.layers,
        zero=zero,
    )


PLACES = {memory.GPU: "GPU, per rank", memory.CPU: "CPU, per node", memory.NVME: "NVMe, per node"}
VERDICTS = {True: "fits", False: "does not fit", None: "unknown"}
STATUS = {True: 0, False: 1, None: 2}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit plan",
        usage="hpcinit plan [KEY=VALUE ...] [--json] [-q | -v]",
        description=__doc__,
        epilog="KEY=VALUE and flags such as --multirun work as in hpcinit submit, whose --help shows every key.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return console.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    """Run `hpcinit plan`. Raise RequestError if the command line contains a program.

    argv: the same arguments as for `hpcinit submit`, plus --json.
    """
    if "--" in argv:
        raise RequestError("hpcinit plan runs no program: remove -- and the program, or use hpcinit submit")
    options, arguments = console.parse_known_arguments(parser(), list(argv))
    return compose.main(arguments, _check, lambda requests: _show_all(requests, options.json))


def _check(request: Request) -> None:
    if problems := all_checks.problems(request.config, to_submit=False):
        raise ConfigError(*problems)
    estimate_memory(request.config)  # so that an error appears before the first table of a sweep


def _show_all(requests: Sequence[Request], as_json: bool) -> int:
    status = 0
    for request in requests:
        found = estimate_memory(request.config)
        if as_json:
            print(json_output.line("plan", _document(request, found)))
        elif console.quiet():
            print(verdict(found))
        else:
            out = Console(highlight=False, soft_wrap=True, color_system=console.color_system())
            lines = filter(None, [request.combination, *equations(request.config), *_table(found)])
            out.print(*lines, sep="\n", markup=False)
            out.print(verdict(found), markup=False, style="bold")
            print("".join(f"not counted: {line}\n" for line in found.unknown), end="")
        status = max(status, STATUS[found.fits])
    return status


def equations(config: Config) -> list[str]:
    """Return two equations as text: one for the number of ranks, and one for the samples per step.

    Raise RequestError if the settings do not fit together.
    """
    per_node = resources.ranks_per_node(config)
    world_size = config.nodes * per_node
    layout = job_spec.layout(config).over(world_size, per_node)
    product = " x ".join(f"{name} {degree}" for name, degree in layout.degrees().items() if degree > 1) or "1"
    batch = job_spec.samples(config).over(layout.dp_replicate * layout.dp_shard)
    return [
        f"nodes {config.nodes} x ranks per node {per_node} = {world_size} ranks = {product}",
        f"{batch.equation()} samples per step",
    ]


def _document(request: Request, found: Estimate) -> dict[str, Any]:
    return {
        **{"combination": request.combination, "equations": equations(request.config)},
        **{"parts": [vars(part) for part in found.parts], "bytes": found.totals, "limits": found.limits},
        **{"margin": found.margin, "verdict": VERDICTS[found.fits], "unknown": found.unknown},
    }


def _table(found: Estimate) -> Iterator[str]:
    rows = [("where", "what", "when", "how", "GB")]
    for place, title in PLACES.items():
        here = [part for part in found.parts if part.place == place]
        times = 1 if place == memory.GPU else found.ranks_per_node
        of = f" x {times} ranks" if times > 1 else ""
        for part in here:
            rows.append((title, part.name, part.during, f"{part.how}{of}", f"{part.bytes * times / GB:.2f}"))
        if here:
            most = "always + the larger of pass, step"
            rows.append((title, "at most", "", most, f"{found.totals[place] / GB:.2f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *texts, number in rows:
        yield "  ".join([*map(str.ljust, texts, widths), number.rjust(widths[-1])])


def verdict(found: Estimate) -> str:
    """Return whether the model fits, and why not.

    An example is 'does not fit: GPU, per rank needs 112.0 GB of 74.0 GB (80 GB - 6.0 GB for ...)'.
    """
    parts = []
    for place, limit in found.limits.items():
        needs, margin, how = found.totals[place] / GB, 0.0, ""
        if place == memory.GPU:
            margin = found.margin / GB
            assumed = f"{math.floor(100 * FRAGMENTS)} % + {CONTEXT / GB:.0f} GB, an assumption"
            how = f" ({limit / GB:.0f} GB - {margin:.1f} GB for CUDA, NCCL and fragmentation: {assumed})"
        parts.append(f"{PLACES[place]} needs {needs:.1f} GB of {limit / GB - margin:.1f} GB{how}")
    if found.fits is None:
        parts.append("cluster.gpu_mem_gb is not set: set it to the memory of a GPU of this cluster")
    return f"{VERDICTS[found.fits]}{' (counted parts only)' * bool(found.fits and found.unknown)}: {'; '.join(parts)}"
