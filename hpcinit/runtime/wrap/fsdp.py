"""FSDP2: fully_shard over the ranks of a mesh, and copies of that over the others (HSDP)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpcinit.facts.layout import Layout
from hpcinit.runtime import mesh as mesh_of_run


def meshes(
    mesh: DeviceMesh, layout: Layout, device: torch.device, sharded: bool
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Over which ranks parameters are copied and sharded, and the tensor parallel ranks; they have one parent.

    Parts of a sequence count as data. Not sharded, each rank of the data has them whole: fully_shard then takes a mesh
    whose last dimension is 1. (DDP itself takes no DTensors but by turning them into others in each forward.)
    """
    found = mesh_of_run.part(mesh, "dp_replicate", "fsdp") if sharded else None
    if found is not None:
        return found, mesh_of_run.part(mesh, "tp")
    shape = (dist.get_world_size() // layout.tp, 1, layout.tp)
    own = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    return own["dp_replicate", "dp_shard"], own["tp"]


def wrap(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, param: torch.dtype, reduce: torch.dtype
) -> tuple[Callable[..., Any], Callable[[bool], None]]:
    """The forward, and what says before it whether its gradients are averaged over the ranks.

    Block by block, so that one block's parameters at a time are whole; what is left is sharded with the model itself.
    Between steps parameters are in float32. param: what they are gathered and computed in.
    """
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if not isinstance(model, FSDPModule):
        raise TypeError(f"fully_shard made no FSDPModule of {type(model).__name__}")
    return model, model.set_requires_gradient_sync
