"""Implements run.wrap(), which makes a model trainable on all ranks, as configured with `parallel`.

model, optimizer -> tensor parallel -> activation checkpointing -> compile -> ddp | fsdp -> Wrapped
                 -> activation checkpointing -> compile -> DeepSpeed's engine -> Wrapped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hpcinit.base.errors import RequestError
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Training
from hpcinit.train.wrap import deepspeed_engine, native, sequence
from hpcinit.train.wrap.strategy import Inputs, Strategy
from hpcinit.train.wrap.wrapped import MakeOptimizer, Wrapped

__all__ = ["STRATEGIES", "Wrapped", "wrap"]

# The torch part of each wrapper. records/wrappers.py describes how to add a wrapper.
STRATEGIES: dict[str, Strategy] = {
    "ddp": native.DDP(),
    "fsdp": native.FSDP(),
    "deepspeed": deepspeed_engine.DeepSpeed(),
    "none": native.Unwrapped(),
}


def wrap(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    layout: Layout,
    device: torch.device,
    batch: Batch,
    training: Training,
    optimizer: MakeOptimizer | None = None,
    tp_plan: Mapping[str, ParallelStyle] | None = None,
    blocks: Sequence[nn.Module] | None = None,
    mpu: Any = None,
) -> Wrapped:
    """Wrap the model so that all ranks train it together, and return it. Every rank must pass the same arguments.

    Runtime.wrap describes the other arguments and the errors.

    mesh, layout: the run's mesh and layout. No degree of the layout may be -1.
    """
    _refuse(layout)
    strategy = STRATEGIES[training.wrap]
    inputs = Inputs(model, mesh, layout, device, batch, training, optimizer, tp_plan, blocks, mpu)
    strategy.check(inputs)
    return strategy.wrap(inputs, sequence.attention(mesh, layout, device, training.compile))


def _refuse(layout: Layout) -> None:
    if layout.pp > 1 or layout.ep > 1:
        name = "pp" if layout.pp > 1 else "ep"
        raise RequestError(
            f"parallel.{name} is {getattr(layout, name)}, but run.wrap supports no pipeline or expert parallelism. "
            f"Implement it in the program with the groups of run.mesh, or use parallel.{name}=1"
        )
