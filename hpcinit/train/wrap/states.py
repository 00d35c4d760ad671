"""Moves states off the device temporarily, for example while another model generates text on the device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcinit.base.errors import RequestError

# DeepSpeed's names (runtime/zero/offload_config.py): the optimizer's state, the fp32 master copy, the parameters that
# the model computes with, their gradients, and the buffer for reducing gradients (stage 3).
State = Literal["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"]
STATES: tuple[State, ...] = get_args(State)
Moved = list[tuple[Tensor, Tensor]]  # the original tensor, whose storage is empty, and its copy


def checked(include: Collection[State] | None) -> frozenset[State]:
    """Return the states with these names, or all states for None. Raise RequestError if a state is unknown."""
    chosen = STATES if include is None else include
    for name in chosen:
        if name not in STATES:
            raise RequestError(f"offload_states() got an unknown state {name!r}; the states are: {', '.join(STATES)}")
    return frozenset(chosen)


@torch.no_grad()
def to_cpu(optimizer: Optimizer, pin_memory: bool, non_blocking: bool) -> Moved:
    """Move the optimizer's states to the CPU and free their memory on the device. Shards of DTensors are moved too.

    Tensors that share memory stay on the device, and so do single numbers, such as the step count.
    """
    moved: Moved = []
    for state in optimizer.state.values():
        for value in state.values():
            tensor = value.to_local() if isinstance(value, DTensor) else value
            if not isinstance(tensor, Tensor) or not tensor.dim():
                continue
            if tensor.nbytes and tensor.untyped_storage().nbytes() == tensor.nbytes:
                copy = torch.empty_like(tensor, device="cpu", pin_memory=pin_memory and tensor.is_cuda)
                moved.append((tensor, copy.copy_(tensor, non_blocking=non_blocking)))
    for tensor, _ in moved:
        tensor.untyped_storage().resize_(0)  # safe, because the stream frees the memory after the copy
    if any(tensor.is_cuda for tensor, _ in moved):
        torch.cuda.empty_cache()
    return moved


@torch.no_grad()
def back(moved: Moved, non_blocking: bool) -> None:
    """Move the states back to the device.

    moved: what to_cpu() returned.
    """
    for tensor, copy in moved:
        tensor.untyped_storage().resize_(tensor.nbytes)
        tensor.copy_(copy, non_blocking=non_blocking)
