"""Whether torch is told the group's device, which binds the group to it and starts NCCL at once.

A bound group is up when init returns, and its errors come early. But torch then makes every later group by splitting
it (ncclCommSplit), which all ranks must take part in: a group with a process outside the job, made by code that does
not know, hangs (https://github.com/allenai/open-instruct/pull/1311). Hence never, unless asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcinit.base.errors import BringUpError
from hpcinit.base.versions import key

# Collectives of a bound group deadlock between these two (https://github.com/pytorch/pytorch/issues/153960); DeepSpeed
# leaves device_id out for the same versions.
DEADLOCKS = "2.6.0", "2.7.1"
FIRST_DEEPSPEED = "0.17.6"  # binds by itself from 0.17.3 on, also where it must not, and mended by this one


@dataclass(frozen=True)
class Binding:
    """device: what torch is told, None for nothing. why: a few words for the log line, '' where there is no news."""

    device: torch.device | None
    why: str = ""


def decide(
    policy: str, device: torch.device, world_size: int, torch_version: str, deepspeed_version: str | None
) -> Binding:
    """policy: never, auto or always. deepspeed_version: None where it is not asked for.

    Raises BringUpError for 'always' where there is nothing to bind to.
    """
    if policy == "never":
        return Binding(None)
    against = _against(device, world_size, torch_version, deepspeed_version)
    if policy == "auto":
        return Binding(None, f"no device_id: {against}") if against else Binding(device, f"device_id {device}")
    if device.type == "cpu":
        raise BringUpError(f"comm.device_id is always, and it cannot be: {against}; use auto or never")
    return Binding(device, f"device_id {device}, although {against}" if against else f"device_id {device}")


def _against(device: torch.device, world_size: int, torch_version: str, deepspeed_version: str | None) -> str:
    """What is known to speak against it, '' for nothing."""
    if device.type == "cpu":
        return "gloo on a CPU has no device to bind to"
    if device.type != "cuda":
        return f"untried on {device.type}"
    if world_size == 1:
        return "a single rank has no peer (DeepSpeed issue 8248)"
    if key(DEADLOCKS[0]) < key(torch_version) < key(DEADLOCKS[1]):
        return f"with torch {torch_version} collectives can deadlock (pytorch issue 153960), {DEADLOCKS[1]} is mended"
    if deepspeed_version is not None and key(deepspeed_version) < key(FIRST_DEEPSPEED):
        return f"DeepSpeed {deepspeed_version} is older than {FIRST_DEEPSPEED}, the first to bind on CUDA only"
    return ""
