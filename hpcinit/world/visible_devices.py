"""Which devices the environment lets this process see, and which of them is this rank's.

CUDA_VISIBLE_DEVICES    "2,1"            in this order; the first invalid entry ends the list ("0,2,-1,1" is 0 and 2)
                        "" "-1" "0,0"    none; Slurm says none as "NoDevFiles"
                        "GPU-8932f937"   UUIDs, possibly abbreviated; the first entry decides of which kind all are
                        "MIG-a,MIG-b"    CUDA shows one MIG instance to a process: the first
ROCR_VISIBLE_DEVICES    "4,5"            HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, then counts within these two
ZE_AFFINITY_MASK        "0,1" "0.1"      devices, or tiles of one; a set, whose order says nothing

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

# What restricts which kind of device, for messages. GPU_DEVICE_ORDINAL, which Slurm sets too, is OpenCL's.
VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"),
}
# SLURM_TRES_BIND is what the user asked for, SLURMD_TRES_BIND (since 22.05) what this very step got.
BINDINGS = ("SLURMD_TRES_BIND", "SLURM_TRES_BIND")
# "gpu:per_task:2" (22.05), "gres/gpu:per_task:2" (24.11): two devices for each task, and no other task has them.
_PER_TASK = re.compile(r"gpu:per_task:(\d+)")
GIVEN = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # what Slurm gave to the step and to the job on this node
# Where each launcher says how many ranks there are on this node.
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
    """What a process may see.

    names: indices or UUIDs as the variables list them; None where no variable restricts anything.
    set_by: the variables that matter, as 'NAME=value'.
    private: no other rank sees these devices.
    on_node: how many ranks of this node Slurm gave a device to; None where it does not say.
    """

    names: tuple[str, ...] | None
    set_by: tuple[str, ...] = ()
    private: bool = False
    on_node: int | None = None


def read(env: Mapping[str, str], kind: str, is_task: bool = False) -> Visible:
    """What `env` says about devices of `kind`: cuda, rocm or xpu; of others nothing is known.

    is_task: this rank is a task that Slurm started. Under torchrun or mpirun a task's devices are those of all the
    ranks that it started.
    """
    names = _READERS[kind](env) if kind in _READERS else None
    bound = _PER_TASK.search(_binding(env)) if is_task else None
    own = bound is not None and (names is None or len(names) == int(bound[1]))
    said = (*VARIABLES.get(kind, ()), *(BINDINGS[:1] if BINDINGS[0] in env else BINDINGS[1:]))
    return Visible(
        names=names,
        set_by=tuple(f"{name}={env[name]}" for name in said if name in env),
        private=own or (names is not None and len(names) == 1),
        on_node=_on_node(env) if is_task else None,
    )


def index_of(env: Mapping[str, str], kind: str, count: int, world: World) -> int:
    """The index of this rank's device among the `count` of `kind` that torch sees.

    Raises BringUpError, on every rank of the node, if there are more ranks than devices.
    """
    visible = read(env, kind, is_task=world.launcher == "slurm")
    size = world.local_world_size
    enough = visible.on_node is None or visible.on_node >= size
    if visible.private and enough:
        return 0
    if size <= count:
        return world.local_rank
    if count == 1 and visible.names is None and visible.on_node is not None and enough:
        return 0  # control groups hide the others' devices, and no variable says so
    raise BringUpError(_too_few(visible, count, world, env))


def given(env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables, as 'NAME=value', by which this process should have devices; () if one says that it has none."""
    if any(reader(env) == () for reader in (cuda, _rocr, xpu)):
        return ()
    names = (*GIVEN, *dict.fromkeys(name for names in VARIABLES.values() for name in names))
    return tuple(f"{name}={env[name]}" for name in names if env.get(name) and name != "ZE_FLAT_DEVICE_HIERARCHY")


def cuda(env: Mapping[str, str], variable: str = "CUDA_VISIBLE_DEVICES") -> tuple[str, ...] | None:
    """As torch and the driver read it; None if it is not set."""
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
    """HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, within ROCR_VISIBLE_DEVICES."""
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
    """Tiles count as devices unless ZE_FLAT_DEVICE_HIERARCHY is COMPOSITE; then their cards do."""
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
    """Unlike CUDA's, a list may mix indices and UUIDs: "0,GPU-4b2c1a9f"."""
    text = env.get("ROCR_VISIBLE_DEVICES")
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    ends = (i for i, word in enumerate(words) if not (word.isdigit() or word.startswith("GPU-")))
    return tuple(words[: next(ends, len(words))])


def _number(word: str) -> str:
    """As strtoul reads it: ' 2ampere' is 2. '' for what is no index."""
    found = re.match(r"\s*\+?(\d+)", word)
    return str(int(found[1])) if found else ""


def _binding(env: Mapping[str, str]) -> str:
    return next((env[name] for name in BINDINGS if name in env), "")


def _on_node(env: Mapping[str, str]) -> int | None:
    """SLURM_GPUS_ON_NODE: the step's devices on this node. --ntasks-per-gpu means to share them."""
    devices, sharing = env.get("SLURM_GPUS_ON_NODE", ""), env.get("SLURM_NTASKS_PER_GPU", "1")
    return int(devices) * int(sharing) if devices.isdigit() and sharing.isdigit() else None


def _too_few(visible: Visible, count: int, world: World, env: Mapping[str, str]) -> str:
    devices = ", ".join(visible.set_by) or "nothing restricts them"
    if visible.on_node is not None:
        devices += f", SLURM_GPUS_ON_NODE={env.get('SLURM_GPUS_ON_NODE')}"
    sizes = LOCAL_SIZES.get(world.launcher, ())
    ranks = next((f"{name}={env[name]}" for name in sizes if name in env), f"as {world.launcher} says")
    do = f"start at most {count} per node, or give each its own (srun --gpus-per-task=1)"
    names = visible.names or ()
    if names and names[0].startswith("MIG-") and len(names) > count:
        do = "CUDA shows one MIG instance to a process, so give each rank its own (srun --gpus-per-task=1)"
    elif visible.names is None and count == 1:
        do += "; to let them share it, say so: CUDA_VISIBLE_DEVICES=0"
    return (
        f"local rank {world.local_rank} on {world.host or 'this node'} has no device of its own: "
        f"{world.local_world_size} ranks are on the node ({ranks}), and {count} of its devices can be seen "
        f"({devices}); {do}"
    )
