"""CPU affinity: each rank runs on the CPUs near its device, unless the launcher has bound it already.

The kernel reports which CPUs are near, in /sys/bus/pci/devices/<address>/numa_node and local_cpulist. Threads and
data loader workers that start later inherit the affinity.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from hpcinit.base.text import numbers, ranges
from hpcinit.runtime import devices
from hpcinit.world import World
from hpcinit.world.cpus import PROC, SYSFS, cores, everything, share
from hpcinit.world.visible_devices import read


def bind(
    world: World,
    device: torch.device,
    *,
    sysfs: Path = SYSFS,
    proc: Path = PROC,
    env: Mapping[str, str] = os.environ,
) -> str:
    """Bind this process to its share of the CPUs near `device`. Return one sentence for the log, also if unchanged.

    Ranks that share a list of devices split the CPUs of a NUMA node by local rank, in whole cores. A rank that sees
    only its own devices gets all CPUs of the NUMA node, because it cannot see which other ranks use them. The number
    of torch's threads is lowered to the number of CPUs, unless OMP_NUM_THREADS is set. Never raises.
    """
    if not hasattr(os, "sched_getaffinity"):
        return "CPU affinity left unchanged: this system has no sched_setaffinity"
    allowed = os.sched_getaffinity(0)
    try:
        reason = _reason_to_leave(world, device, allowed, everything(sysfs, proc), env)
        if reason:
            return f"CPU affinity left at {ranges(allowed)} ({reason})"
        mine, where = _choose(world, device, allowed, sysfs, env)
        _bind_all_threads(mine, allowed)
    except (OSError, ValueError) as error:
        return f"CPU affinity left at {ranges(allowed)} ({error})"
    if "OMP_NUM_THREADS" not in env and torch.get_num_threads() > len(mine):
        torch.set_num_threads(len(mine))
    return f"CPU affinity {ranges(mine)} ({where})"


def _reason_to_leave(
    world: World, device: torch.device, allowed: set[int], everything: set[int], env: Mapping[str, str]
) -> str:
    if device.type == "cpu":
        return "no GPU"
    if world.local_world_size == 1:
        return "only one rank on the node"
    if everything - allowed:
        return f"already bound to {len(allowed)} of {len(everything)} CPUs"
    granted = env.get("SLURM_CPUS_ON_NODE", "") if world.launcher == "slurm" else ""
    if granted.isdigit() and int(granted) < len(everything):
        return f"Slurm gave {granted} of {len(everything)} CPUs without binding; other jobs may use the rest"
    return ""


def _choose(
    world: World, device: torch.device, allowed: set[int], sysfs: Path, env: Mapping[str, str]
) -> tuple[set[int], str]:
    """Return this rank's CPUs and a description of their location. Raise ValueError if the location is unknown."""
    address = devices.pci_address(device)
    if not address:
        raise ValueError(f"torch {torch.__version__} does not report the PCI address of {device}")
    node = _numa_node(address, sysfs)
    near = numbers((sysfs / "bus/pci/devices" / address / "local_cpulist").read_text()) & allowed
    if node < 0 or not near:
        raise ValueError(f"the kernel reports no NUMA node or no usable CPU for {device} at {address}")
    where = f"NUMA node {node}, near {device}"
    if _has_its_own(world, device, env):
        return near, f"{where}, possibly shared with other ranks"
    neighbours = [rank for rank in range(world.local_world_size) if _node_of(rank, device, sysfs) == node]
    return share(cores(near, sysfs), len(neighbours), neighbours.index(world.local_rank)), where


def _has_its_own(world: World, device: torch.device, env: Mapping[str, str]) -> bool:
    """Return whether this rank sees only its own devices, and therefore not those of the other ranks."""
    visible = read(env, devices.kind(device), is_task=world.launcher == "slurm")
    return visible.private or device.index != world.local_rank


def _node_of(rank: int, device: torch.device, sysfs: Path) -> int:
    """Return the NUMA node of the device of local rank `rank`, when all ranks share one list of devices."""
    return _numa_node(devices.pci_address(torch.device(device.type, rank)), sysfs)


def _numa_node(address: str, sysfs: Path) -> int:
    """Return the NUMA node, or -1 if the kernel reports none (a machine with one node, or a virtual one)."""
    return int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())


def _bind_all_threads(mine: set[int], before: set[int]) -> None:
    """Bind this thread, and every other thread that still has the affinity `before`."""
    os.sched_setaffinity(0, mine)
    for thread in map(int, os.listdir("/proc/self/task")):  # noqa: PTH208 - numbers, no paths
        try:
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, mine)
        except ProcessLookupError:
            continue  # the thread has ended
