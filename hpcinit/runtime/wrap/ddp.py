"""DistributedDataParallel: the whole model on every rank, gradients averaged while the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def wrap(
    model: nn.Module, device: torch.device, reduce: torch.dtype
) -> tuple[Callable[..., Any], Callable[[bool], None]]:
    """The forward, and what says before it whether its gradients are averaged over the ranks.

    Parameters and gradients stay in float32, gradients in the buckets that are sent: to be zeroed in place, as those of
    a first pass of an accumulation would else get memory of their own beside them. reduce: what gradients are sent in.
    """
    replica = DistributedDataParallel(
        model, device_ids=None if device.type == "cpu" else [device], gradient_as_bucket_view=True
    )
    if reduce == torch.bfloat16:
        replica.register_comm_hook(None, bf16_compress_hook)

    def synchronise(on: bool) -> None:
        replica.require_backward_grad_sync = on  # all that no_sync() does, which would have to be held open

    return replica, synchronise
