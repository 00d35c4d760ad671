"""DDP, FSDP and a model alone: torch's own, with torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcinit.facts.batch import Batch
from hpcinit.facts.errors import RequestError
from hpcinit.facts.spec import Training
from hpcinit.runtime.wrap import blocks as repeated
from hpcinit.runtime.wrap import clipping, ddp, fsdp, start, states, tensor
from hpcinit.runtime.wrap.sequence import Attention
from hpcinit.runtime.wrap.strategy import Inputs, Strategy
from hpcinit.runtime.wrap.wrapped import Wrapped

if TYPE_CHECKING:
    from hpcinit.facts.layout import Layout
    from hpcinit.runtime.checkpoint.folder import Description

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DDP(Strategy):
    """DDP; together with tensor parallelism fully_shard, in which each data parallel rank keeps whole parameters."""

    shards_data = False  # among the data parallel ranks

    def check(self, inputs: Inputs) -> None:
        if inputs.layout.tp > 1 and not inputs.tp_plan:
            raise RequestError(
                f"parallel.tp is {inputs.layout.tp} and run.wrap was given no tp_plan: which layers are divided, and "
                "how? tp_plan={'blocks.*.up': ColwiseParallel(), ...}, or parallel.tp=1"
            )

    def wrap(self, inputs: Inputs, attention: Attention) -> Wrapped:
        model, device, training = inputs.model, inputs.device, inputs.training
        sharded = self.shards_data or inputs.layout.tp > 1
        _check_precision(training, device, sharded)
        param, reduce = DTYPES[training.precision.param], DTYPES[training.precision.reduce]
        start.same_on_all_ranks(model, device)
        forward: Callable[..., Any] = model
        synchronise: Callable[[bool], None] = _ignore
        if sharded:
            data, divided = fsdp.meshes(inputs.mesh, inputs.layout, device, self.shards_data)
            if divided is not None and inputs.tp_plan:
                tensor.divide(model, divided, inputs.tp_plan)
            parts = repeated.prepare(model, inputs.blocks, training, attention.again)
            forward, synchronise = fsdp.wrap(model, parts, data, param, reduce)
            param = torch.float32  # fully_shard casts by itself
        else:
            repeated.prepare(model.to(device), inputs.blocks, training, attention.again)
            if dist.get_world_size() > 1:
                forward, synchronise = ddp.wrap(model, device, reduce)
        optimizer = inputs.optimizer(_groups(model)) if inputs.optimizer else None
        return Native(
            model, optimizer, inputs.batch, attention, forward, synchronise, device, param, training.gradient_clip
        )


class FSDP(DDP):
    """fully_shard over the data parallel ranks."""

    shards_data = True

    def check(self, inputs: Inputs) -> None:
        super().check(inputs)
        for problem in inputs.training.wrapper.problems(inputs.layout):
            raise RequestError(problem)


class Unwrapped(DDP):
    """One rank, which has nothing to combine."""

    def check(self, inputs: Inputs) -> None:
        if dist.get_world_size() > 1:
            raise RequestError(
                f"parallel.wrap is none with {dist.get_world_size()} ranks: nothing would keep them together; "
                "wrap the model yourself, or parallel.wrap=ddp, fsdp or deepspeed"
            )
        super().check(inputs)


def _ignore(synchronise: bool) -> None:
    """One rank has nothing to average."""


def _groups(model: nn.Module) -> list[Any]:
    """Parameters, in groups where they lie on different meshes."""
    groups = clipping.by_mesh(p for p in model.parameters() if p.requires_grad)
    return groups[0] if len(groups) == 1 else [{"params": group} for group in groups]


def _check_precision(training: Training, device: torch.device, sharded: bool) -> None:
    if training.precision.reduce == "bf16" and device.type == "cpu" and not sharded:
        raise RequestError(
            "precision.reduce is bf16 with parallel.wrap=ddp on a CPU, where torch's DDP cannot: precision.reduce=fp32"
        )
    if training.precision.param != "fp16":
        return
    if device.type == "cpu" or sharded:
        where = "on a CPU" if device.type == "cpu" else "with parallel.wrap=fsdp or tensor parallelism"
        raise RequestError(
            f"precision.param is fp16 {where}, where gradients are not scaled against its small range: bf16"
        )


class Native(Wrapped):
    """scaler: of gradients in fp16; it does nothing in other precisions."""

    scaler: torch.amp.GradScaler

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Batch,
        attention: Attention,
        forward: Callable[..., Any],
        synchronise: Callable[[bool], None],
        device: torch.device,
        dtype: torch.dtype,
        gradient_clip: float,
    ) -> None:
        super().__init__(model, optimizer, batch, attention)
        self._run, self._synchronise = forward, synchronise
        self._device, self._dtype, self._clip = device, dtype, gradient_clip
        self._moved: states.Moved = []
        self._in_buckets = isinstance(forward, DistributedDataParallel)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def _forward(self, boundary: bool, *args: Any, **kwargs: Any) -> Any:
        self._synchronise(boundary)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            return self._run(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss / self.batch.accumulation))

    def _step(self, complete: bool) -> None:
        if not complete or self.optimizer is None:
            return
        if self._clip:
            self.scaler.unscale_(self.optimizer)
            self.grad_norm = clipping.clip(self.model.parameters(), self._clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self._in_buckets)

    def _offload(
        self, chosen: frozenset[states.State], named: bool, pin_memory: bool, non_blocking: bool
    ) -> frozenset[states.State]:
        if others := chosen - {"optim_states"} if named else ():
            raise RequestError(
                f"offload_states() has {', '.join(sorted(others))} with parallel.wrap=ddp or fsdp, whose optim_states "
                "alone can go; the others with parallel.wrap=deepspeed"
            )
        if "optim_states" in chosen and self.optimizer is not None:
            self._moved += states.to_cpu(self.optimizer, pin_memory, non_blocking)
        return chosen & {"optim_states"}

    def _reload(self, non_blocking: bool) -> None:
        states.back(self._moved, non_blocking)
        self._moved = []

    def save_files(self, folder: Path) -> list[str]:
        from hpcinit.runtime.checkpoint import native  # noqa: PLC0415 - a second to import, for those who save

        return native.save(self.model, self.optimizer, folder)

    def load_files(self, path: Path, saved: Description, layout: Layout) -> None:
        from hpcinit.runtime.checkpoint import native  # noqa: PLC0415 - as above

        native.load(self.model, self.optimizer, path)
