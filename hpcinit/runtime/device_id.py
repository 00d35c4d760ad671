"""Decide whether to pass device_id to torch, which binds the group to a device and starts NCCL at once.

A bound group is connected when init returns, so its errors appear early. But torch then creates every later group by
splitting it (ncclCommSplit), in which all ranks must take part. A group with a process outside the job then hangs
(https://github.com/allenai/open-instruct/pull/1311). The default is therefore 'never'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcinit.base.errors import BringUpError
from hpcinit.base.versions import key

# Collectives of a bound group deadlock between these two (https://github.com/pytorch/pytorch/issues/153960); DeepSpeed
# omits device_id for the same versions.
DEADLOCKS = "2.6.0", "2.7.1"
FIRST_DEEPSPEED = "0.17.6"  # 0.17.3 to 0.17.5 bind automatically, also where it is an error


@dataclass(frozen=True)
class Binding:
    """The decision. device: the device_id for torch, or None. why: a note for the log, '' if there is none."""

    device: torch.device | None
    why: str = ""


def decide(
    policy: str, device: torch.device, world_size: int, torch_version: str, deepspeed_version: str | None
) -> Binding:
    """Return the binding for this device. policy: never, auto or always. deepspeed_version: None without DeepSpeed.

    Raise BringUpError if the policy is 'always' and the device cannot be bound.
    """
    if policy == "never":
        return Binding(None)
    against = _against(device, world_size, torch_version, deepspeed_version)
    if policy == "auto":
        return Binding(None, f"no device_id: {against}") if against else Binding(device, f"device_id {device}")
    if device.type == "cpu":
        raise BringUpError(f"comm.device_id=always is not possible: {against}; use auto or never")
    return Binding(device, f"device_id {device}, although {against}" if against else f"device_id {device}")


def _against(device: torch.device, world_size: int, torch_version: str, deepspeed_version: str | None) -> str:
    """Return the known reason not to bind, or ''."""
    if device.type == "cpu":
        return "gloo on a CPU has no device to bind to"
    if device.type != "cuda":
        return f"not tested on {device.type}"
    if world_size == 1:
        return "a single rank has no peer (DeepSpeed issue 8248)"
    if key(DEADLOCKS[0]) < key(torch_version) < key(DEADLOCKS[1]):
        return f"with torch {torch_version} collectives can deadlock (pytorch issue 153960), fixed in {DEADLOCKS[1]}"
    if deepspeed_version is not None and key(deepspeed_version) < key(FIRST_DEEPSPEED):
        return f"DeepSpeed {deepspeed_version} is older than {FIRST_DEEPSPEED}, the first to bind on CUDA only"
    return ""
