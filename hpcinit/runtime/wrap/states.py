"""States that leave the device for a while, such as while another model generates on it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcinit.base.errors import RequestError

# DeepSpeed's own names (runtime/zero/offload_config.py): of the optimizer, the master copy in fp32, the parameters that
# the model computes with, their gradients, and the buffer in which gradients are reduced (stage 3).
State = Literal["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"]
STATES: tuple[State, ...] = get_args(State)
Moved = list[tuple[Tensor, Tensor]]  # where it was, whose storage is empty meanwhile, and its copy


def checked(include: Collection[State] | None, device: str) -> frozenset[State]:
    """None is all. Raises RequestError for what is no state, and for another device than the CPU."""
    if device != "cpu":
        raise RequestError(f"offload_states(device={device!r}), expected 'cpu': DeepSpeed moves states nowhere else")
    chosen = STATES if include is None else include
    for name in chosen:
        if name not in STATES:
            raise RequestError(f"offload_states() has {name!r}, expected some of: {', '.join(STATES)}")
    return frozenset(chosen)


@torch.no_grad()
def to_cpu(optimizer: Optimizer, pin_memory: bool, non_blocking: bool) -> Moved:
    """Copies of the optimizer's states, which keep their place but give their memory back, shards of DTensors too.

    A tensor that shares its memory with others stays, as does a single number (the count of steps).
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
        tensor.untyped_storage().resize_(0)  # in the order of the stream: after the copy
    if any(tensor.is_cuda for tensor, _ in moved):
        torch.cuda.empty_cache()
    return moved


@torch.no_grad()
def back(moved: Moved, non_blocking: bool) -> None:
    """What to_cpu() has moved, where it was."""
    for tensor, copy in moved:
        tensor.untyped_storage().resize_(tensor.nbytes)
        tensor.copy_(copy, non_blocking=non_blocking)
