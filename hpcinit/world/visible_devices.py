"""Chooses the device that this rank should use, among the devices that torch sees.

When torch counts devices, it reads the variables that restrict them, such as CUDA_VISIBLE_DEVICES. This module finds
out whether other ranks of the node see the same devices.

https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/PROG.html#affinity-mask
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcinit.base.errors import BringUpError
from hpcinit.world import World

# The variables that restrict each kind of device. Slurm also sets GPU_DEVICE_ORDINAL, which is for OpenCL.
VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
# SLURM_TRES_BIND: what the user requested. SLURMD_TRES_BIND (since 22.05): what this step got.
BINDINGS = ("SLURMD_TRES_BIND", "SLURM_TRES_BIND")
# "gpu:per_task:2" (22.05), "gres/gpu:per_task:2" (24.11): two devices for each task, which no other task has.
_PER_TASK = re.compile(r"gpu:per_task:(\d+)")
GIVEN = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # the devices that Slurm gave to the step and to the job on this node
NONE = {"", "-1", "NoDevFiles"}  # values that hide all devices; Slurm writes the last one


def index_of(env: Mapping[str, str], kind: str, count: int, world: World) -> int:
    """Return the index of the device that this rank should use, among the devices that torch sees.

    Raise BringUpError, on every rank of the node, if there are more ranks than devices.

    kind: cuda, rocm or xpu.
    count: how many devices of this kind torch sees.
    """
    on_node, size = _on_node(env, world), world.local_world_size
    enough = on_node is None or on_node >= size
    if is_private(env, kind, count, world) and enough:
        return 0
    if size <= count:
        return world.local_rank
    if count == 1 and not _listed(env, kind) and on_node is not None and enough:
        return 0  # control groups hide the other ranks' devices without setting a variable
    raise BringUpError(_too_few(env, kind, count, world))


def is_private(env: Mapping[str, str], kind: str, count: int, world: World) -> bool:
    """Return whether only this rank sees the `count` devices of this kind that torch sees.

    This is the case if a variable lists a single device, or if Slurm bound this task to `count` devices. If srun did
    not start the ranks, Slurm's binding is no proof, because several ranks share a task's devices.
    """
    if count == 1 and any("," not in text for text in _listed(env, kind).values()):
        return True
    text = next((env[name] for name in BINDINGS if name in env), "") if world.launcher == "slurm" else ""
    bound = _PER_TASK.search(text)
    return bound is not None and int(bound[1]) == count


def _listed(env: Mapping[str, str], kind: str) -> dict[str, str]:
    return {name: env[name] for name in VARIABLES.get(kind, ()) if name in env}


def given(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that give this process devices, as 'NAME=value'. If one hides all devices, return ()."""
    if any(env.get(name) in NONE for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")):
        return ()
    names = (*GIVEN, *dict.fromkeys(name for names in VARIABLES.values() for name in names))
    return tuple(f"{name}={env[name]}" for name in names if env.get(name))


def _on_node(env: Mapping[str, str], world: World) -> int | None:
    """Return how many ranks can use the node's devices, counting shared devices several times, or None if unknown.

    Only Slurm's variables show it, so it is unknown under another launcher.
    """
    devices, sharing = env.get("SLURM_GPUS_ON_NODE", ""), env.get("SLURM_NTASKS_PER_GPU", "1")
    known = world.launcher == "slurm" and devices.isdigit() and sharing.isdigit()
    return int(devices) * int(sharing) if known else None


def _too_few(env: Mapping[str, str], kind: str, count: int, world: World) -> str:
    slurms = (*(BINDINGS[:1] if BINDINGS[0] in env else BINDINGS[1:]), "SLURM_GPUS_ON_NODE")
    names = (*_listed(env, kind), *(slurms if world.launcher == "slurm" else ()))
    restricted = ", ".join(f"{name}={env[name]}" for name in names if name in env) or "no variable restricts them"
    advice = f"start at most {count} per node, or give each rank its own (srun --gpus-per-task=1)"
    if "," in (text := env.get("CUDA_VISIBLE_DEVICES", "")) and text.startswith("MIG-"):
        advice = "CUDA shows only one MIG instance to a process, so give each rank its own (srun --gpus-per-task=1)"
    elif count == 1 and not _listed(env, kind):
        advice += "; to let the ranks share it, set CUDA_VISIBLE_DEVICES=0"
    return (
        f"local rank {world.local_rank} on {world.host or 'this node'} has no device for itself: "
        f"{world.local_world_size} ranks are on the node, but torch sees only {count} "
        f"device{'s' * (count != 1)} ({restricted}); {advice}"
    )
