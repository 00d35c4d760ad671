"""Computes how much GPU memory each rank needs for parameters, gradients, optimizer states and buffers, in bytes.

P is the number of parameters divided by tp and pp. N is the number of ranks that shard these parameters.

tests/records/test_memory.py measures states and gradients on real ranks. Some sizes are computed but not
measured: memory on NVMe, temporaries, the copies that autocast makes, and the parameters that ZeRO 3 gathers. Their
formulas follow from these sources (docs/reference/memory.md):

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (Rajbhandari et al. 2019, arXiv:1910.02054):
    Section 3.1: mixed precision with Adam needs 2P + 2P + KP bytes. K is 12 (master copy, momentum, variance: 4 each).
    Section 5: stage 1 needs 2P + 2P + KP/N, stage 2 2P + (2P + KP)/N, stage 3 (2P + 2P + KP)/N.
DeepSpeed's estimate_zero2_model_states_mem_needs and estimate_zero3_model_states_mem_needs in runtime/zero:
    They compute 18 instead of 16 bytes per parameter. The optimizer step copies the gradients of the shard to fp32,
    4P/N. The bucket sizes are from runtime/zero/config.py.
torch's documentation:
    fully_shard: parameters are sharded in their own dtype, gathered in param_dtype and reduced in reduce_dtype.
    DistributedDataParallel: gradient_as_bucket_view.
    torch.optim: foreach takes about sizeof(params) more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcinit.base.errors import RequestError
from hpcinit.records.layout import Layout

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
STATES = {"adamw": 8, "muon": 4, "momentum": 4, "sgd": 0}  # bytes per parameter, for two, one or no states in fp32
GPU, CPU, NVME = "gpu", "cpu", "nvme"
ALWAYS, PASS, STEP = "always", "pass", "step"  # pass: forward and backward pass. step: the optimizer step after it


@dataclass(frozen=True)
class Zero:
    """The DeepSpeed options that affect memory. The defaults are DeepSpeed's.

    The sizes of buckets, live parameters and sub-groups are numbers of elements.
    """

    stage: int = 0
    offload_param: str = "none"
    offload_optimizer: str = "none"
    hpz: int = 1
    overlap_comm: bool | None = None
    reduce_bucket_size: int = 500_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    sub_group_size: int = 1_000_000_000

    @property
    def buffers(self) -> int:
        """Return the number of communication buffers: 2 in stages 1 and 2 with overlap_comm, otherwise 1."""
        overlap = self.stage == 3 if self.overlap_comm is None else self.overlap_comm
        return 2 if overlap and self.stage in {1, 2} else 1


@dataclass(frozen=True)
class Demand:
    """A model and the settings with which it is trained. memory.py computes the memory from them.

    layout: the parallelism. No degree may be -1.
    wrap: a name in wrappers.WRAPPERS.
    optimizer: a name in STATES.
    fused: whether the optimizer step is fused, so that it needs no temporaries.
    layers: the number of layers, or None if unknown.

    Raise RequestError if a number is below 1 or the optimizer is unknown.
    """

    parameters: int
    layout: Layout = field(default_factory=lambda: Layout(dp_replicate=1))
    wrap: str = "ddp"
    param: str = "fp32"
    reduce: str = "fp32"
    optimizer: str = "adamw"
    fused: bool = False
    layers: int | None = None
    zero: Zero = field(default_factory=Zero)

    def __post_init__(self) -> None:
        for key, value in (("model.params", self.parameters), ("model.layers", self.layers)):
            if value is not None and value < 1:
                raise RequestError(f"{key} is {value}, expected 1 or more")
        if self.optimizer not in STATES:
            raise RequestError(f"the optimizer is {self.optimizer!r}, expected one of: {', '.join(STATES)}")

    @property
    def own(self) -> int:
        """Return P, the number of parameters divided by tp and pp. This assumes that all layers are equally large."""
        return -(-self.parameters // (self.layout.tp * self.layout.pp))

    @property
    def block(self) -> int:
        """Return the number of parameters in one layer, or 0 if it is unknown. FSDP gathers one layer at a time."""
        return -(-self.parameters // (self.layout.tp * self.layers)) if self.layers else 0

    @property
    def copies(self) -> int:
        """Return N for ZeRO, which shards over all data parallel ranks.

        Ranks that process different parts of a sequence count as data parallel here.
        """
        return self.layout.dp_replicate * self.layout.dp_shard * self.layout.cp


@dataclass(frozen=True)
class Part:
    """A part of the memory that a rank needs.

    bytes: its size on one rank.
    place: where it is: gpu, cpu or nvme.
    during: when it is needed: always, pass (forward and backward) or step (of the optimizer).
    how: the formula for its size.
    """

    name: str
    bytes: int
    how: str
    place: str = GPU
    during: str = ALWAYS


def total(parts: Sequence[Part], place: str) -> int:
    """Return the highest memory use in `place`, in bytes.

    This is the sum of all parts that are always needed, plus the parts of a pass or of an optimizer step, whichever
    are larger.
    """
    sums = {
        during: sum(part.bytes for part in parts if part.place == place and part.during == during)
        for during in (ALWAYS, PASS, STEP)
    }
    return sums[ALWAYS] + max(sums[PASS], sums[STEP])


def _per(name: str, each: int, of: int, shards: int = 1, place: str = GPU, during: str = ALWAYS) -> Part:
    """Return the part `name` of the memory: `of` elements of `each` bytes, divided among `shards` ranks."""
    how = f"{each} B x {_short(of)}" + (f" / {shards}" if shards > 1 else "")
    return Part(name, each * -(-of // shards), how, place, during)


def _short(number: int) -> str:
    return f"{number:.3g}".replace("e+0", "e").replace("e+", "e") if number >= 1000 else str(number)


def _temporaries(demand: Demand, shards: int = 1) -> Iterator[Part]:
    """Yield the temporaries of torch.optim. By default (foreach, on CUDA), they are about as large as the parameters.

    A fused optimizer step and SGD need none.
    """
    if not demand.fused and demand.optimizer != "sgd":
        yield _per("step's temporaries", 4, demand.own, shards, during=STEP)


def ddp(demand: Demand) -> Iterator[Part]:
    """Yield the parts of the memory with DDP: 4P + 4P + states, all in fp32, even under autocast.

    The gradients need no extra memory for buckets, because they are views of the buckets (gradient_as_bucket_view).
    """
    yield _per("parameters", 4, demand.own)
    yield _per("gradients", 4, demand.own)
    yield _per("optimizer states", STATES[demand.optimizer], demand.own)
    # autocast keeps its copies until the end of the forward pass, and autograd keeps them until the backward pass.
    if demand.param != "fp32":
        yield _per("autocast's copies", BYTES[demand.param], demand.own, during=PASS)
    yield from _temporaries(demand)


def fsdp(demand: Demand, shards: int) -> Iterator[Part]:
    """Yield the parts of the memory with FSDP: (4P + 4P + states)/N.

    During forward and backward, FSDP also needs two unsharded blocks (one is prefetched), the gradients of one block,
    and a copy of these gradients for the reduction.
    """
    yield _per("parameters", 4, demand.own, shards)
    yield _per("gradients", 4, demand.own, shards)
    yield _per("optimizer states", STATES[demand.optimizer], demand.own, shards)
    each = 3 * BYTES[demand.param] + BYTES[demand.reduce]
    yield _per("unsharded blocks", each, demand.block, during=PASS)
    yield from _temporaries(demand, shards)


def zero(demand: Demand) -> Iterator[Part]:
    """Yield the parts of the memory with DeepSpeed, for the ZeRO stage of `demand`."""
    return _zero_0(demand) if demand.zero.stage == 0 else _zero_1_to_3(demand)


def _zero_0(demand: Demand) -> Iterator[Part]:
    """Yield the parts of the memory of ZeRO stage 0.

    For P parameters in 16 bits, in bytes: 2P parameters, 2P gradients, 4P master copy in fp32, and the optimizer
    states. The optimizer step needs 4P more, for gradients in fp32. In fp32, there is no master copy.
    """
    each, mixed = BYTES[demand.param], demand.param != "fp32"
    yield _per("parameters", each, demand.own)
    yield _per("gradients", each, demand.own)
    yield _per("master copy", 4 * mixed, demand.own)
    yield _per("optimizer states", STATES[demand.optimizer], demand.own)
    yield _per("gradients in fp32", 4 * mixed, demand.own, during=STEP)
    if demand.copies > 1:
        yield _per("all-reduce bucket", each, min(demand.own, 500_000_000), during=PASS)  # a literal in engine.py
    yield from _temporaries(demand)


def _zero_1_to_3(demand: Demand) -> Iterator[Part]:
    """Yield the parts of ZeRO stages 1 to 3. Even in fp32, each rank keeps a master copy of its shard."""
    zero, own, shards, each = demand.zero, demand.own, demand.copies, BYTES[demand.param]
    offloaded = zero.offload_optimizer != "none"
    states = CPU if offloaded and zero.stage < 3 else {"none": GPU}.get(zero.offload_optimizer, zero.offload_optimizer)
    yield from _zero_parameters(demand)
    if zero.stage == 3:
        yield _per("gradients", each, own, shards, CPU if offloaded else GPU)
    elif zero.stage == 1 or not offloaded:
        yield _per("gradients", each, own, shards if zero.stage == 2 else 1, during=PASS)
    yield _per("master copy", 4, own, shards, states)
    yield _per("optimizer states", STATES[demand.optimizer], own, shards, states)
    group = min(-(-own // shards), zero.sub_group_size) if zero.stage == 3 else -(-own // shards)
    if not offloaded:
        yield _per("gradients in fp32", 4, group, during=STEP)
        yield from _temporaries(demand, -(-own // group))
    else:
        yield _per("gradients in fp32", 4, own, shards, states)
        if zero.stage < 3:
            yield _per("staged shard", each, own, shards, CPU)
        if states == NVME:  # optimizer_utils.py: 4 buffers (buffer_count), each as large as the largest sub-group
            yield _per("NVMe's buffers, optimizer", 4 * 4, group, place=CPU)
    yield _per("reduce bucket", each * zero.buffers, zero.reduce_bucket_size)


def _zero_parameters(demand: Demand) -> Iterator[Part]:
    zero, own, each = demand.zero, demand.own, BYTES[demand.param]
    if zero.stage < 3:
        yield _per("parameters", each, own)
        return
    place = {"none": GPU}.get(zero.offload_param, zero.offload_param)
    yield _per("parameters", each, own, demand.copies, place)
    if place == NVME:  # partitioned_param_swapper.py: 5 buffers (buffer_count) of 1e8 elements (buffer_size)
        yield _per("NVMe's buffers, parameters", each * 5, 100_000_000, place=CPU)
    if zero.hpz > 1:
        yield _per("hpZ's second shard", each, own, zero.hpz)
    gathered = max(zero.stage3_max_live_parameters, demand.block) + zero.stage3_prefetch_bucket_size
    yield _per("gathered parameters", each, min(own, gathered), during=PASS)
