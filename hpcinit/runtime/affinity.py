"""Each rank on the CPUs beside its device, where the launcher has not bound it already.

The kernel says what is near: /sys/bus/pci/devices/<address>/numa_node and local_cpulist. Threads that start later
inherit the affinity, data loaders too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from hpcinit.base.text import ranges
from hpcinit.runtime import devices
from hpcinit.world import World
from hpcinit.world.cpus import PROC, SYSFS, cores, cpus, everything, share
from hpcinit.world.visible_devices import read


def bind(
    world: World,
    device: torch.device,
    *,
    sysfs: Path = SYSFS,
    proc: Path = PROC,
    env: Mapping[str, str] = os.environ,
) -> str:
    """Bind this process to its share of the CPUs near `device`; what was done, or why nothing, in one sentence.

    Ranks that share a list of devices split the CPUs of a NUMA node by their order, whole cores each. Where a rank
    sees its own devices only, nobody can tell who else is near: it gets all CPUs of the NUMA node. torch's threads
    are cut to the CPUs that are left, unless OMP_NUM_THREADS says how many. Raises nothing.
    """
    if not hasattr(os, "sched_getaffinity"):
        return "cpus as they are: this system binds no processes"
    allowed = os.sched_getaffinity(0)
    try:
        reason = _reason_to_leave(world, device, allowed, everything(sysfs, proc), env)
        if reason:
            return f"cpus {ranges(allowed)} as the launcher left them ({reason})"
        mine, where = _choose(world, device, allowed, sysfs, env)
        _bind_all_threads(mine, allowed)
    except (OSError, ValueError) as error:
        return f"cpus {ranges(allowed)} as the launcher left them ({error})"
    if "OMP_NUM_THREADS" not in env and torch.get_num_threads() > len(mine):
        torch.set_num_threads(len(mine))
    return f"cpus {ranges(mine)} ({where})"


def _reason_to_leave(
    world: World, device: torch.device, allowed: set[int], everything: set[int], env: Mapping[str, str]
) -> str:
    if device.type == "cpu":
        return "there is no device to be near to"
    if world.local_world_size == 1:
        return "one rank on the node"
    if everything - allowed:
        return f"bound to {len(allowed)} of {len(everything)}"
    granted = env.get("SLURM_CPUS_ON_NODE", "") if world.launcher == "slurm" else ""
    if granted.isdigit() and int(granted) < len(everything):
        return f"Slurm gave {granted} of {len(everything)} and confines nobody: the rest may be another job's"
    return ""


def _choose(
    world: World, device: torch.device, allowed: set[int], sysfs: Path, env: Mapping[str, str]
) -> tuple[set[int], str]:
    """This rank's CPUs, and where they are. Raises ValueError that says what is not known."""
    address = devices.pci_address(device)
    if not address:
        raise ValueError(f"torch {torch.__version__} does not tell where {device} is")
    node = _numa_node(address, sysfs)
    near = cpus((sysfs / "bus/pci/devices" / address / "local_cpulist").read_text()) & allowed
    if node < 0 or not near:
        raise ValueError(f"the kernel names no NUMA node or no usable CPU for {device} at {address}")
    where = f"NUMA node {node}, beside {device}"
    if _has_its_own(world, device, env):
        return near, f"{where}, perhaps with other ranks"
    neighbours = [rank for rank in range(world.local_world_size) if _node_of(rank, device, sysfs) == node]
    return share(cores(near, sysfs), len(neighbours), neighbours.index(world.local_rank)), where


def _has_its_own(world: World, device: torch.device, env: Mapping[str, str]) -> bool:
    """True where this rank sees only its own devices, and so cannot know where the others' are."""
    visible = read(env, devices.kind(device), is_task=world.launcher == "slurm")
    return visible.private or device.index != world.local_rank


def _node_of(rank: int, device: torch.device, sysfs: Path) -> int:
    """The NUMA node of the device that local rank `rank` has, where all share one list."""
    return _numa_node(devices.pci_address(torch.device(device.type, rank)), sysfs)


def _numa_node(address: str, sysfs: Path) -> int:
    """-1 where the kernel does not know: a machine with one node, or a virtual one."""
    return int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())


def _bind_all_threads(mine: set[int], before: set[int]) -> None:
    """This thread, and the others unless somebody bound them elsewhere."""
    os.sched_setaffinity(0, mine)
    for thread in map(int, os.listdir("/proc/self/task")):  # noqa: PTH208 - numbers, no paths
        try:
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, mine)
        except ProcessLookupError:
            continue  # it has ended
