"""A model made trainable on all ranks, as `parallel.wrap` and its neighbours say.

model, optimizer -> tensor parallel -> activation checkpointing -> compile -> ddp | fsdp -> Wrapped
                 -> activation checkpointing -> compile -> DeepSpeed's engine -> Wrapped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hpcinit.facts.batch import Batch
from hpcinit.facts.errors import RequestError
from hpcinit.facts.layout import Layout
from hpcinit.facts.spec import Training
from hpcinit.runtime.wrap import blocks as repeated
from hpcinit.runtime.wrap import deepspeed, native, sequence
from hpcinit.runtime.wrap.wrapped import MakeOptimizer, Wrapped

__all__ = ["Wrapped", "wrap"]


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
    _refuse(layout, training, tp_plan)
    attention = sequence.attention(mesh, layout, device, training.compile)
    if training.wrap != "deepspeed":
        return native.wrap(model, blocks, tp_plan, mesh, layout, device, batch, training, optimizer, attention)
    repeated.prepare(model, blocks, training, attention.again)
    return deepspeed.wrap(model, layout, device, batch, training, optimizer, attention, mesh, mpu)


def _refuse(layout: Layout, training: Training, tp_plan: Mapping[str, ParallelStyle] | None) -> None:
    if layout.pp > 1 or layout.ep > 1:
        name = "pp" if layout.pp > 1 else "ep"
        raise RequestError(
            f"parallel.{name} is {getattr(layout, name)}, and run.wrap does no pipeline or expert parallelism: "
            f"run.mesh has the groups for what the program does itself, or parallel.{name}=1"
        )
    if training.wrap == "none" and dist.get_world_size() > 1:
        raise RequestError(
            f"parallel.wrap is none with {dist.get_world_size()} ranks: nothing would keep them together; "
            "wrap the model yourself, or parallel.wrap=ddp, fsdp or deepspeed"
        )
    if training.wrap == "deepspeed" and tp_plan is not None:
        raise RequestError(
            "a tp_plan is for parallel.wrap=ddp or fsdp: with deepspeed, AutoTP divides the model by itself"
        )
    if training.wrap != "deepspeed" and layout.tp > 1 and not tp_plan:
        raise RequestError(
            f"parallel.tp is {layout.tp} and run.wrap was given no tp_plan: which layers are divided, and how? "
            "tp_plan={'blocks.*.up': ColwiseParallel(), ...}, or parallel.tp=1"
        )
    if training.wrap == "fsdp" and layout.dp_shard * layout.cp == 1 and layout.dp_replicate > 1:
        raise RequestError(
            f"parallel.wrap is fsdp with dp_replicate {layout.dp_replicate} and dp_shard 1: nothing would be divided; "
            "parallel=fsdp, or parallel.wrap=ddp"
        )
