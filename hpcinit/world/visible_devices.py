"""Reads which devices the environment lets this process see, and which of them this rank should use.

CUDA_VISIBLE_DEVICES    "2,1"            in this order; the first invalid entry ends the list ("0,2,-1,1" is 0 and 2)
                        "" "-1" "0,0"    none; Slurm writes "NoDevFiles" for none
                        "GPU-8932f937"   UUIDs, possibly abbreviated; the first entry decides the kind of all entries
                        "MIG-a,MIG-b"    CUDA shows one MIG instance to a process: the first
ROCR_VISIBLE_DEVICES    "4,5"            HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, then counts within these two
ZE_AFFINITY_MASK        "0,1" "0.1"      devices, or tiles of one; a set, whose order has no meaning

https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/PROG.html#affinity-mask
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcinit.base.errors import BringUpError
from hpcinit.world import World

# The variables that restrict each kind of device, for messages. GPU_DEVICE_ORDINAL, which Slurm sets too, is OpenCL's.
VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"),
}
# SLURM_TRES_BIND is what the user requested, SLURMD_TRES_BIND (since 22.05) what this step got.
BINDINGS = ("SLURMD_TRES_BIND", "SLURM_TRES_BIND")
# "gpu:per_task:2" (22.05), "gres/gpu:per_task:2" (24.11): two devices for each task, which no other task has.
_PER_TASK = re.compile(r"gpu:per_task:(\d+)")
GIVEN = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # the devices that Slurm gave to the step and to the job on this node
# Each launcher's variable for the number of ranks on this node.
LOCAL_SIZES = {
    "slurm": ("SLURM_GTIDS",),
    "openmpi": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    "mpich": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    "horovod": ("HOROVOD_LOCAL_SIZE",),
    "torchrun": ("LOCAL_WORLD_SIZE",),
    "env": ("LOCAL_WORLD_SIZE",),
}


@dataclass(frozen=True)
class Visible:
    """The devices that this process can see.

    names: indices or UUIDs as the variables list them, or None if no variable restricts them.
    set_by: the variables that have an effect, as 'NAME=value'.
    private: whether no other rank sees these devices.
    on_node: the number of ranks on this node to which Slurm gave a device, or None if unknown.
    """

    names: tuple[str, ...] | None
    set_by: tuple[str, ...] = ()
    private: bool = False
    on_node: int | None = None


def read(env: Mapping[str, str], kind: str, is_task: bool = False) -> Visible:
    """Return which devices the environment `env` lets this process see.

    kind: cuda, rocm or xpu. For other kinds, nothing is restricted.
    is_task: whether Slurm started this rank as a task. It is False under torchrun or mpirun: the devices of the task
        then belong to all ranks that the task started.
    """
    names = _READERS[kind](env) if kind in _READERS else None
    bound = _PER_TASK.search(next((env[name] for name in BINDINGS if name in env), "")) if is_task else None
    own = bound is not None and (names is None or len(names) == int(bound[1]))
    variables = (*VARIABLES.get(kind, ()), *(BINDINGS[:1] if BINDINGS[0] in env else BINDINGS[1:]))
    return Visible(
        names=names,
        set_by=tuple(f"{name}={env[name]}" for name in variables if name in env),
        private=own or (names is not None and len(names) == 1),
        on_node=_on_node(env) if is_task else None,
    )


def index_of(env: Mapping[str, str], kind: str, count: int, world: World) -> int:
    """Return the index of the device that this rank should use, among the devices that torch sees.

    Raise BringUpError, on every rank of the node, if there are more ranks than devices.

    kind: cuda, rocm or xpu.
    count: how many devices of this kind torch sees.
    """
    visible = read(env, kind, is_task=world.launcher == "slurm")
    size = world.local_world_size
    enough = visible.on_node is None or visible.on_node >= size
    if visible.private and enough:
        return 0
    if size <= count:
        return world.local_rank
    if count == 1 and visible.names is None and visible.on_node is not None and enough:
        return 0  # control groups hide the other ranks' devices, and no variable shows it
    raise BringUpError(_too_few(visible, count, world, env))


def given(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that give this process devices, as 'NAME=value'. If one hides all devices, return ()."""
    if any(reader(env) == () for reader in (cuda, _rocr, xpu)):
        return ()
    names = (*GIVEN, *dict.fromkeys(name for names in VARIABLES.values() for name in names))
    return tuple(f"{name}={env[name]}" for name in names if env.get(name) and name != "ZE_FLAT_DEVICE_HIERARCHY")


def cuda(env: Mapping[str, str], variable: str = "CUDA_VISIBLE_DEVICES") -> tuple[str, ...] | None:
    """Return the devices that torch and the driver read from the variable, or None if it is not set."""
    text = env.get(variable)
    if text is None:
        return None
    prefix = next((prefix for prefix in ("GPU-", "MIG-") if text.startswith(prefix)), "")
    names: list[str] = []
    for word in text.split(","):
        name = (word if word.startswith(prefix) else "") if prefix else _number(word)
        if name in names:
            return ()
        if not name:
            break
        names.append(name)
    return tuple(names)


def rocm(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the ROCm devices that this process can see, or None if no variable restricts them.

    ROCR_VISIBLE_DEVICES applies first. From the remaining devices, HIP_VISIBLE_DEVICES selects by index, or
    CUDA_VISIBLE_DEVICES if HIP_VISIBLE_DEVICES is unset.
    """
    inner = cuda(env, "HIP_VISIBLE_DEVICES") if "HIP_VISIBLE_DEVICES" in env else cuda(env)
    outer = _rocr(env)
    if outer is None or inner is None:
        return outer if inner is None else inner
    names: list[str] = []
    for name in inner:
        if name.isdigit() and int(name) >= len(outer):
            break
        names.append(outer[int(name)] if name.isdigit() else name)
    return tuple(names)


def xpu(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the XPU devices that this process can see, or None if no variable restricts them.

    Each tile of a card counts as a device. With ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE, each card counts as one device.
    """
    text = env.get("ZE_AFFINITY_MASK")
    if not text:
        return None  # as if it were not set
    words = [word.strip() for word in text.split(",")]
    if env.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE":
        words = [word.partition(".")[0] for word in words]
    found = {word for word in words if re.fullmatch(r"\d+(\.\d+)*", word)}
    return tuple(sorted(found, key=lambda word: [int(part) for part in word.split(".")]))


_READERS = {"cuda": cuda, "rocm": rocm, "xpu": xpu}


def _rocr(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the entries of ROCR_VISIBLE_DEVICES. They may mix indices and UUIDs, unlike CUDA's: "0,GPU-4b2c1a9f"."""
    text = env.get("ROCR_VISIBLE_DEVICES")
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    ends = (i for i, word in enumerate(words) if not (word.isdigit() or word.startswith("GPU-")))
    return tuple(words[: next(ends, len(words))])


def _number(word: str) -> str:
    """Return the index as strtoul reads it: '2' for ' 2ampere', or '' if there is none."""
    found = re.match(r"\s*\+?(\d+)", word)
    return str(int(found[1])) if found else ""


def _on_node(env: Mapping[str, str]) -> int | None:
    """Return how many ranks on this node have a device from Slurm, or None if unknown.

    It is SLURM_GPUS_ON_NODE, multiplied by --ntasks-per-gpu, because that many tasks share a device.
    """
    devices, sharing = env.get("SLURM_GPUS_ON_NODE", ""), env.get("SLURM_NTASKS_PER_GPU", "1")
    return int(devices) * int(sharing) if devices.isdigit() and sharing.isdigit() else None


def _too_few(visible: Visible, count: int, world: World, env: Mapping[str, str]) -> str:
    devices = ", ".join(visible.set_by) or "nothing restricts them"
    if visible.on_node is not None:
        devices += f", SLURM_GPUS_ON_NODE={env.get('SLURM_GPUS_ON_NODE')}"
    sizes = LOCAL_SIZES.get(world.launcher, ())
    ranks = next((f"{name}={env[name]}" for name in sizes if name in env), f"according to {world.launcher}")
    advice = f"start at most {count} per node, or give each rank its own (srun --gpus-per-task=1)"
    names = visible.names or ()
    if names and names[0].startswith("MIG-") and len(names) > count:
        advice = "CUDA shows one MIG instance to a process, so give each rank its own (srun --gpus-per-task=1)"
    elif visible.names is None and count == 1:
        advice += "; to let the ranks share it, set CUDA_VISIBLE_DEVICES=0"
    return (
        f"local rank {world.local_rank} on {world.host or 'this node'} has no device for itself: "
        f"{world.local_world_size} ranks are on the node ({ranks}), but only {count} devices are visible "
        f"({devices}); {advice}"
    )
