"""Chooses the CPUs and devices of a forked rank, as srun does for a task."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpcinit.records.spec import Launch
from hpcinit.world import cpus as kernel
from hpcinit.world import visible_devices

VERBOSITY_PREFIXES = ("quiet,", "verbose,", "q,", "v,")
# In each of these variables, Slurm lists the step's devices on this node.
DEVICE_LISTS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")


def cpus(
    launch: Launch, ranks: int, allowed: set[int], env: Mapping[str, str], *, sysfs: Path = kernel.SYSFS
) -> list[set[int]] | None:
    """Return the CPUs of each local rank, or None if all ranks may use the CPUs of their parent.

    launch.cpu_bind decides. If it is not set, each rank gets whole cores of the CPUs to which Slurm bound the task, but
    the result is None
    - if Slurm did not bind the task, or bound it to too few CPUs,
    - if the job has the whole node and its devices: each rank then binds itself near its device (runtime/devices.py).

    ranks: the number of ranks on the node.
    allowed: the CPUs that this process may use.
    """
    kind, _, value = _without_verbosity(launch.cpu_bind).partition(":")
    if kind == "none":
        return None
    if kind in ("mask_cpu", "map_cpu"):
        numbers = [int(word, 16) if kind == "mask_cpu" else int(word, 0) for word in value.split(",")]
        sets = [_set_bits(number) if kind == "mask_cpu" else {number} for number in numbers]
        return [sets[rank % len(sets)] & allowed or allowed for rank in range(ranks)]
    if not kind:
        granted = env.get("SLURM_CPUS_ON_NODE", "")
        if not granted.isdigit() or int(granted) < len(allowed):
            return None
        if visible_devices.given(env) and len(allowed) == len(kernel.everything(sysfs)):
            return None
    if len(allowed) < ranks * (launch.cpus or 1):
        return None
    cores = kernel.cores(allowed, sysfs)
    return [kernel.share(cores, ranks, rank) for rank in range(ranks)]


def devices(launch: Launch, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that restrict a rank to its own devices, or {} if launch.gpu_bind is not set."""
    kind, _, value = _without_verbosity(launch.gpu_bind).partition(":")
    if kind in ("", "none"):
        return {}
    found = {}
    for name in DEVICE_LISTS:
        listed = [word for word in env.get(name, "").split(",") if word]
        if not listed:
            continue
        if kind == "map_gpu":
            places = [int(word) for word in value.split(",")]
            mine = [places[local_rank % len(places)]]
        else:  # single:1, per_task:N
            each = int(value)
            mine = list(range(local_rank * each, (local_rank + 1) * each))
        found[name] = ",".join(listed[place] for place in mine if place < len(listed))
    return found


def _without_verbosity(option: str | None) -> str:
    """Return Slurm's option without a leading 'quiet,' or 'verbose,', or '' for None."""
    text = option or ""
    return next((text.removeprefix(word) for word in VERBOSITY_PREFIXES if text.startswith(word)), text)


def _set_bits(mask: int) -> set[int]:
    return {place for place in range(mask.bit_length()) if mask >> place & 1}


def apply(mine: set[int]) -> None:
    """Bind this process to the CPUs `mine`. Do nothing if none of them is usable."""
    try:
        os.sched_setaffinity(0, mine)
    except (OSError, AttributeError):  # no usable CPU, or no such function on this system
        return
