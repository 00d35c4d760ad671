"""Describes each value of `parallel.wrap` with an object: DDP, FSDP2, DeepSpeed or none.

This module doesn't need torch. To add a wrapper, change three files:

1. this one: a subclass of Wrapper, and its line in WRAPPERS;
2. a module in `train/wrap/`: a Strategy, which wraps the model, and a Wrapped, which steps, saves and loads;
3. `train/wrap/__init__.py`: the Strategy's line in STRATEGIES.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import ClassVar

from hpcinit.base.errors import SpecError
from hpcinit.records import memory
from hpcinit.records.layout import Layout
from hpcinit.records.memory import Demand, Part

TORCH_FORMAT, DEEPSPEED_FORMAT = "torch", "deepspeed"


class Wrapper(abc.ABC):
    """The facts about one value of `parallel.wrap`.

    name: the value.
    needs_deepspeed: whether the ranks start DeepSpeed and the `deepspeed.` options apply.
    checkpoint_format: wrappers with the same format can load each other's checkpoints.
    for_many_ranks: whether the wrapper combines the gradients of several ranks.
    whole_model: whether every rank has all parameters. With tensor parallelism, a rank has only a part of them.
    """

    name: ClassVar[str]
    needs_deepspeed: ClassVar[bool] = False
    checkpoint_format: ClassVar[str] = TORCH_FORMAT
    for_many_ranks: ClassVar[bool] = True
    whole_model: ClassVar[bool] = False

    def problems(self, layout: Layout) -> Iterator[str]:
        """Yield a message for each part of `layout` that this wrapper does not support.

        layout: the degrees of parallelism. No degree may be -1.
        """
        yield from ()

    def memory(self, demand: Demand) -> tuple[Part, ...]:
        """Return the parts of one rank's memory, without activations. Parts of 0 bytes are omitted."""
        return tuple(part for part in self._parts(demand) if part.bytes)

    @abc.abstractmethod
    def _parts(self, demand: Demand) -> Iterator[Part]: ...

    def not_counted(self, demand: Demand) -> Sequence[str]:
        """Return one line for each part of the memory that memory() can't compute.

        The line names the config keys that hpcinit would need to compute that part.
        """
        return ()


class DDP(Wrapper):
    """Wraps the model in torch's DistributedDataParallel."""

    name = "ddp"
    whole_model = True

    def problems(self, layout: Layout) -> Iterator[str]:
        if layout.dp_shard > 1:
            yield (
                f"parallel.wrap is ddp with dp_shard {layout.dp_shard}, but DDP cannot shard: use parallel.wrap=fsdp, "
                "or parallel.dp_replicate=-1 parallel.dp_shard=1"
            )

    def _parts(self, demand: Demand) -> Iterator[Part]:
        # With tensor parallelism, run.wrap uses fully_shard even for ddp, with one shard.
        return memory.fsdp(demand, 1) if demand.layout.tp > 1 else memory.ddp(demand)


class FSDP(Wrapper):
    """Shards the model with torch's fully_shard (FSDP2)."""

    name = "fsdp"

    def problems(self, layout: Layout) -> Iterator[str]:
        if layout.dp_shard * layout.cp == 1 and layout.dp_replicate > 1:
            replicate = layout.dp_replicate
            yield (
                f"parallel.wrap is fsdp with dp_replicate {replicate} and dp_shard 1: nothing would be sharded; use "
                f"parallel=fsdp, parallel.dp_shard={replicate} parallel.dp_replicate=1, or parallel.wrap=ddp"
            )

    def _parts(self, demand: Demand) -> Iterator[Part]:
        return memory.fsdp(demand, demand.layout.dp_shard * demand.layout.cp)

    def not_counted(self, demand: Demand) -> Sequence[str]:
        return () if demand.layers else ("the blocks that FSDP gathers: set model.layers",)


class DeepSpeed(Wrapper):
    """Trains with DeepSpeed's engine, with ZeRO stage 0 to 3."""

    name = "deepspeed"
    needs_deepspeed = True
    checkpoint_format = DEEPSPEED_FORMAT

    def problems(self, layout: Layout) -> Iterator[str]:
        replicate, shard = layout.dp_replicate, layout.dp_shard
        if replicate > 1 and shard > 1:
            yield (
                f"parallel.wrap is deepspeed with dp_replicate {replicate} and dp_shard {shard}: ZeRO "
                "shards over all data parallel ranks; use parallel.dp_replicate=1 parallel.dp_shard=-1, with "
                "deepspeed.hpz for shards within a node"
            )

    def _parts(self, demand: Demand) -> Iterator[Part]:
        return memory.zero(demand)


class Unwrapped(Wrapper):
    """Leaves the model unchanged. For training on one rank, or if the program implements the parallelism itself."""

    name = "none"
    for_many_ranks = False

    def _parts(self, demand: Demand) -> Iterator[Part]:
        return DDP()._parts(demand)


WRAPPERS: dict[str, Wrapper] = {wrapper.name: wrapper for wrapper in (DDP(), FSDP(), DeepSpeed(), Unwrapped())}


def get(name: str) -> Wrapper:
    """Return the wrapper for a value of `parallel.wrap`. Raise SpecError if WRAPPERS does not contain `name`."""
    if name not in WRAPPERS:
        raise SpecError(f"parallel.wrap is {name!r}, expected one of: {', '.join(WRAPPERS)}")
    return WRAPPERS[name]


def of_format(checkpoint_format: str) -> str:
    """Return the names of the multi-rank wrappers that use this checkpoint format, such as 'ddp or fsdp'."""
    found = [each for each in WRAPPERS.values() if each.checkpoint_format == checkpoint_format and each.for_many_ranks]
    return " or ".join(each.name for each in found)
