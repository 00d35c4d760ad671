"""Equal weights to begin with."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn

from hpcinit.facts.errors import RequestError


@torch.no_grad()
def same_on_all_ranks(model: nn.Module, device: torch.device) -> None:
    """Rank 0's parameters and buffers, on every rank.

    DDP does so by itself. fully_shard keeps of each rank's parameters its own shard: with other seeds on other ranks it
    would put together a model that nobody has made. Raises RequestError for a model without data.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RequestError(
                f"{name} is on the meta device and has no data: build the model on run.device or the CPU"
            )
        if dist.get_world_size() > 1:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)
