"""From a config to what its ranks will hold, beside what its cluster has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcinit.config import checks, job_spec
from hpcinit.config.schema import Config
from hpcinit.facts import activations, memory, wrappers
from hpcinit.facts.activations import Transformer
from hpcinit.facts.errors import RequestError
from hpcinit.facts.layout import Layout
from hpcinit.facts.memory import Demand, Part, Zero

GB = 10**9
# An assumption: CUDA's context and NCCL's buffers take one to two GB, and torch's allocator loses some to fragments.
CONTEXT, FRAGMENTS = 2 * GB, 0.05
# Keys of zero_optimization in the user's own ds_config that memory depends on.
SIZES = {
    "reduce_bucket_size": "reduce_bucket",
    "stage3_max_live_parameters": "live",
    "stage3_prefetch_bucket_size": "prefetch",
    "sub_group_size": "sub_group",
}


@dataclass(frozen=True)
class Estimate:
    """totals: bytes of a rank's GPU, of a node's CPU and NVMe. limits: what there is of each, where known.

    fits: None where what has to be known is not, as why_unknown says. unknown: what is not counted, one line each.
    """

    parts: Sequence[Part]
    totals: Mapping[str, int]
    limits: Mapping[str, float]
    ranks_per_node: int
    unknown: Sequence[str]

    @property
    def margin(self) -> float:
        """Bytes of a GPU that are not for the model."""
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
        return "cluster.gpu_mem_gb is not set: give the memory of a GPU of this cluster"


def of(config: Config) -> Estimate:
    """Raises RequestError for what cannot be estimated."""
    demand = demand_of(config)
    wrapper, unknown = wrappers.get(demand.wrap), []
    parts = [*wrapper.memory(demand)]
    if found := _activations(config, demand.layout):
        parts.append(found)
    else:
        unknown.append(f"activations: give {', '.join(_missing(config))}")
    unknown.extend(wrapper.not_counted(demand))
    if demand.layout.ep > 1:
        unknown.append("ep: every parameter counts as one that all ranks share, so experts take less than said")
    per_node = checks.ranks_per_node(config)
    totals = {place: memory.total(parts, place) for place in (memory.GPU, memory.CPU, memory.NVME)}
    totals = {place: size if place == memory.GPU else size * per_node for place, size in totals.items()}
    limits = {memory.GPU: config.cluster.gpu_mem_gb, memory.CPU: config.mem_gb or None}
    if totals[memory.CPU] and limits[memory.CPU] is None:
        unknown.append("whether the node's memory holds it: give mem_gb")
    if totals[memory.NVME]:
        unknown.append(f"whether {config.deepspeed.nvme_path or 'deepspeed.nvme_path'} has room for it on every node")
    return Estimate(parts, totals, {k: v * GB for k, v in limits.items() if v is not None}, per_node, unknown)


def demand_of(config: Config) -> Demand:
    """Raises RequestError."""
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
    size = activations.of_rank(shape, layout, config.precision.param, full)
    how = f"{'full' if full else 'no'} checkpointing, flash attention, without logits"
    return Part("activations", size, how, during=memory.PASS)
