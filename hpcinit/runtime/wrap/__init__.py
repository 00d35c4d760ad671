"""A model made trainable on all ranks, as `parallel.wrap` and its neighbours say.

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
from hpcinit.runtime.wrap import deepspeed_engine, native, sequence
from hpcinit.runtime.wrap.strategy import Inputs, Strategy
from hpcinit.runtime.wrap.wrapped import MakeOptimizer, Wrapped

__all__ = ["STRATEGIES", "Wrapped", "wrap"]

# The torch part of each wrapper in records/wrappers.py, which describes how to add one.
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
    """The model, trainable on all ranks; every rank calls it with the same.

    model: whole, on any device, and it is changed in place. mesh, layout: of the run, every degree known. optimizer:
    makes one of the parameters, such as `lambda p: torch.optim.AdamW(p, lr=1e-3)`; None for a model that is only
    evaluated, or with an optimizer of DeepSpeed's own. tp_plan: module name, in which * stands for one part of it, to
    torch's ParallelStyle. blocks: the parts that are sharded, checkpointed and compiled one by one; None takes the
    children of each outermost ModuleList or Sequential whose children are all of one class. mpu: DeepSpeed's
    word for an object that knows the groups, where the program divides the model itself.

    Raises RequestError for what cannot be done together.
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
            f"parallel.{name} is {getattr(layout, name)}, and run.wrap does no pipeline or expert parallelism: "
            f"run.mesh has the groups for what the program does itself, or parallel.{name}=1"
        )
