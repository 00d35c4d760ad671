"""Use DeepSpeed's CPUAdam for offloaded optimizer states, where its op is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Adam, AdamW, Optimizer

from hpcinit.base.console import say
from hpcinit.deepspeed.deepspeed_versions import at
from hpcinit.runtime import ops

FORCE = "zero_force_ds_cpu_optimizer"  # DeepSpeed's key in a ds_config; false keeps the program's optimizer
_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")
_OF_TORCH = {*_UNSUPPORTED, "foreach", "fused", "decoupled_weight_decay"}  # keys of a group that CPUAdam lacks


def where_built(
    optimizer: Optimizer, config: Mapping[str, Any], chosen: Mapping[str, Any], device: torch.device
) -> Optimizer:
    """Return CPUAdam instead of torch's Adam or AdamW if its states are offloaded and every node has the op built.

    Rank 0 prints one line. Every rank must call it. config: of DeepSpeed's engine. chosen: the user's part of it.
    """
    offload = at(config, "zero_optimization.offload_optimizer.device")
    if offload not in {"cpu", "nvme"} or chosen.get(FORCE) is False or not _replaceable(optimizer):
        return optimizer
    name = type(optimizer).__name__
    built = torch.tensor([int(ops.is_built("cpu_adam"))], device=device)
    dist.all_reduce(built, op=dist.ReduceOp.MIN)  # ranks of other nodes may have another cache
    if not built:
        _report(f"offloaded optimizer: torch's {name}. For DeepSpeed's CPUAdam: hpcinit build-ops --ops cpu_adam")
        return optimizer
    ops.prepare({**config, "optimizer": {"type": "AdamW"}}, device.type)
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415 - takes a second to import

    groups = [{key: value for key, value in group.items() if key not in _OF_TORCH} for group in optimizer.param_groups]
    adam: Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=isinstance(optimizer, AdamW))
    keep = f"deepspeed.ds_config.{FORCE}=false keeps torch's"
    _report(f"offloaded optimizer: DeepSpeed's CPUAdam instead of torch's {name} ({keep})")
    return adam


def _replaceable(optimizer: Optimizer) -> bool:
    return type(optimizer) in {Adam, AdamW} and not any(
        isinstance(group["lr"], torch.Tensor) or any(group.get(name) for name in _UNSUPPORTED)
        for group in optimizer.param_groups
    )


def _report(line: str) -> None:
    if dist.get_rank() == 0:
        say(line)
