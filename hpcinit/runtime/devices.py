"""Which device is this rank's, and which backend goes with it."""

from __future__ import annotations

import os

import torch

from hpcinit.facts.errors import BringUpError
from hpcinit.facts.world import World

# Who may have hidden devices from this process, for the message.
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def choose(world: World) -> torch.device:
    """This rank's device, already made current; the CPU where torch finds no accelerator.

    The index counts what is visible: one visible device is index 0 for any local rank
    (--gpus-per-task=1). Raises BringUpError if there are fewer devices than local ranks.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = 0 if count == 1 else world.local_rank
    if index >= count:
        hidden = ", ".join(f"{name}={os.environ[name]}" for name in VISIBILITY if name in os.environ)
        raise BringUpError(
            f"local rank {world.local_rank} of {world.local_world_size} on {world.host or 'this node'} has no device: "
            f"{count} visible ({hidden or 'nothing restricts them'}); start as many ranks per node as there are devices"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def backend(device: torch.device, asked: str = "auto") -> str:
    """The backend to use on `device`. Raises BringUpError if torch was built without the one asked for."""
    name = asked if asked != "auto" else torch.distributed.get_default_backend_for_device(device)
    if name == "nccl" and device.type == "cpu":
        raise BringUpError(
            f"backend nccl needs a GPU, and torch {torch.__version__} finds none here; use comm.backend=auto or gloo"
        )
    if not torch.distributed.is_backend_available(name):
        raise BringUpError(f"backend {name!r} is not in this build of torch {torch.__version__}")
    return name
