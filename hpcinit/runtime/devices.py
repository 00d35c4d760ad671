"""Chooses this rank's device and backend, and binds the rank to the CPUs near its device.

If the launcher has already bound the rank to CPUs, the binding is not changed. The kernel lists the CPUs near a device
in /sys/bus/pci/devices/<address>/local_cpulist. Threads and data loader workers that start later inherit the binding.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from hpcinit.base.errors import BringUpError
from hpcinit.base.text import numbers, ranges
from hpcinit.world import World, visible_devices
from hpcinit.world.cpus import PROC, SYSFS, cores, everything, share


def choose(world: World, env: Mapping[str, str] = os.environ) -> torch.device:
    """Return the device that this rank should use, and make it torch's current device.

    Without an accelerator, use the CPU.

    If the rank sees only its own devices (--gpus-per-task), use the first one. If the ranks of a node share a list of
    devices, use the device whose index is the local rank. If there are more ranks than devices, every rank of the node
    raises BringUpError.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = visible_devices.index_of(env, kind(accelerator), torch.accelerator.device_count(), world)
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def unseen(device: torch.device, env: Mapping[str, str] = os.environ) -> str:
    """Return a warning if `device` is the CPU although Slurm or the user gave this rank accelerators.

    Otherwise return ''.
    """
    given = visible_devices.given(env)
    if device.type != "cpu" or not given:
        return ""
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built = ", ".join(f"{name} {version}" for name, version in kinds.items() if version) or "CPUs only"
    return (
        f"warning: this rank runs on the CPU, although {', '.join(given)}: torch {torch.__version__} (built for "
        f"{built}) finds no accelerator. Install a torch build for this cluster's devices, or request no devices"
    )


def kind(device: torch.device) -> str:
    """Return the kind of a device: cuda, rocm, xpu or cpu. torch itself calls ROCm devices cuda."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type


def backend(device: torch.device, asked: str = "auto") -> str:
    """Return the backend to use for tensors on `device`. Raise BringUpError if torch was built without it."""
    name = asked if asked != "auto" else torch.distributed.get_default_backend_for_device(device)
    if name == "nccl" and device.type == "cpu":
        raise BringUpError(
            f"backend nccl needs a GPU, but torch {torch.__version__} finds none here; set comm.backend=auto or gloo"
        )
    if not torch.distributed.is_backend_available(name):
        here = ", ".join(each for each in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(each))
        raise BringUpError(
            f"backend {name!r} is not in this build of torch {torch.__version__}, expected auto or one of: {here}"
        )
    return name


def backends(device: torch.device, asked: str = "auto") -> dict[str, str]:
    """Return the backend for each device type, for a request such as 'nccl' or 'cpu:gloo,cuda:nccl'.

    Without a GPU, 'cpu:gloo,cuda:nccl' results in {'cpu': 'gloo'}. Raise BringUpError if a backend is not available, or
    if `asked` has no backend for `device`.
    """
    if ":" not in asked:
        return {device.type: backend(device, asked)}
    try:
        pairs = dict(pair.strip().split(":") for pair in asked.split(","))
    except ValueError:
        raise BringUpError(f"backend is {asked!r}, expected one name, or pairs such as cpu:gloo,cuda:nccl") from None
    if device.type not in pairs:
        raise BringUpError(
            f"backend is {asked!r}, which has no backend for this rank's device {device}: add "
            f"{device.type}:{torch.distributed.get_default_backend_for_device(device)}"
        )
    return {kind: backend(torch.device(kind), name) for kind, name in pairs.items() if kind in {"cpu", device.type}}


def for_deepspeed(device: torch.device) -> None:
    """Make DeepSpeed use `device`, even if its index is not LOCAL_RANK.

    DeepSpeed (0.19) uses LOCAL_RANK as the index of the device. This function patches DeepSpeed's accelerator object,
    so that the index LOCAL_RANK means `device`. It does not change LOCAL_RANK itself, because programs also use it as
    the local rank.

    Call this before deepspeed.initialize or zero.Init. You may call it again with another device.
    """
    if device.type == "cpu":
        return
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - over a second to import

    accelerator = get_accelerator()
    for name in ("set_device", "device_name", "device"):
        original = getattr(type(accelerator), name).__get__(accelerator)

        def translated(device_index=None, original=original):  # type: ignore[no-untyped-def]
            ours = isinstance(device_index, int | str) and str(device_index) == os.environ.get("LOCAL_RANK")
            return original(device.index if ours else device_index)

        setattr(accelerator, name, translated)


def describe(device: torch.device) -> dict[str, str]:
    """Return what identifies the device on its node: `device`, and `name`, `uuid` and `pci` if torch reports them."""
    found = {"device": str(device)}
    if device.type == "cpu":
        return found
    properties = torch.get_device_module(device).get_device_properties(device)
    found["name"] = str(properties.name)
    if hasattr(properties, "uuid"):
        found["uuid"] = str(properties.uuid)
    address = pci_address(device)
    return {**found, "pci": address} if address else found


def pci_address(device: torch.device) -> str:
    """Return the PCI address of the device in sysfs's form, such as '0000:3b:00.0', or '' if torch does not report it.

    CUDA and ROCm builds of torch report it. XPU builds do not yet (https://github.com/intel/torch-xpu-ops/issues/4732).
    """
    properties = torch.get_device_module(device).get_device_properties(device)
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""


def bind_cpus(
    world: World,
    device: torch.device,
    *,
    sysfs: Path = SYSFS,
    proc: Path = PROC,
    env: Mapping[str, str] = os.environ,
) -> str:
    """Bind this process to its share of the CPUs near `device`. Return a sentence for the log, even if nothing changed.

    If the ranks of a node share a list of devices, ranks on the same NUMA node divide its cores among them. A rank that
    sees only its own devices gets all CPUs of the NUMA node, because it cannot see which other ranks use them. If
    OMP_NUM_THREADS is not set, use at most as many torch threads as CPUs. This function never raises.
    """
    if not hasattr(os, "sched_getaffinity"):
        return "CPU affinity left unchanged: this system has no sched_setaffinity"
    allowed = os.sched_getaffinity(0)
    try:
        reason = _reason_to_leave(world, device, allowed, everything(sysfs, proc), env)
        if reason:
            return f"CPU affinity left at {ranges(allowed)} ({reason})"
        mine, where = _near_cpus(world, device, allowed, sysfs, env)
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


def _near_cpus(
    world: World, device: torch.device, allowed: set[int], sysfs: Path, env: Mapping[str, str]
) -> tuple[set[int], str]:
    """Return this rank's CPUs, and their location as text for the log. Raise ValueError if the location is unknown."""
    address = pci_address(device)
    if not address:
        raise ValueError(f"torch {torch.__version__} does not report the PCI address of {device}")
    node = _numa_node(address, sysfs)
    near = numbers((sysfs / "bus/pci/devices" / address / "local_cpulist").read_text()) & allowed
    if node < 0 or not near:
        raise ValueError(
            f"the kernel reports no NUMA node for {device} at {address}, or this process may use none of its CPUs"
        )
    where = f"NUMA node {node}, near {device}"
    if _has_its_own(world, device, env):
        return near, f"{where}, possibly shared with other ranks"
    neighbours = [rank for rank in range(world.local_world_size) if _node_of(rank, device, sysfs) == node]
    return share(cores(near, sysfs), len(neighbours), neighbours.index(world.local_rank)), where


def _has_its_own(world: World, device: torch.device, env: Mapping[str, str]) -> bool:
    """Return whether this rank sees only its own devices, not those of other ranks."""
    count = torch.accelerator.device_count()
    return device.index != world.local_rank or visible_devices.is_private(env, kind(device), count, world)


def _node_of(rank: int, device: torch.device, sysfs: Path) -> int:
    """Return the NUMA node of local rank `rank`'s device, if all ranks of the node see the same devices."""
    return _numa_node(pci_address(torch.device(device.type, rank)), sysfs)


def _numa_node(address: str, sysfs: Path) -> int:
    """Return the NUMA node of the PCI device at `address`, or -1 if the kernel reports none.

    The kernel reports none on a machine with one node or a virtual machine.
    """
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
