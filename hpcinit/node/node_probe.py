"""Collects facts about this node from /proc, /sys, the resolver, nvidia-smi and NCCL. Linux only.

Unknown values are empty. `hpcinit doctor` collects all facts. The check that runs before the ranks start
(node_check.py) does not resolve the names of other nodes.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcinit.base.safe_files import read_or_empty
from hpcinit.node import nccl_interface, nvidia_smi
from hpcinit.records.check_results import SHARED_MEMORY
from hpcinit.records.node_facts import Interface, Name, Node, Place
from hpcinit.records.scratch import ENV_LOCAL_DISK
from hpcinit.world import network

GB = 2**30
MOST_NAMES = 64  # in a large job, resolving every name on every node would overload DNS
SHARING = ("SLURM_SHARDS_ON_NODE", "CUDA_MPS_PIPE_DIRECTORY")  # set if the site shares GPUs between jobs


def probe(env: Mapping[str, str], own: str, names: Sequence[str], backend: str, timeout_s: float) -> Node:
    """Return the facts about this node.

    own: the name of this node.
    names: the names to resolve: the job's nodes, or () for none. Without names, nvidia-smi runs only if Slurm assigned
        GPUs.
    backend: the backend of the process group, such as 'auto' or 'nccl'.
    timeout_s: the time limit of the check. NCCL may take half of this time.
    """
    total, available = _memory()
    assigned = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS") or ""
    gpus, gpu_error = nvidia_smi.query() if assigned or names else ((), "")
    return Node(
        memory_gb=round(total, 1),
        available_gb=round(available, 1),
        kernel=platform.release(),
        places=tuple(_places(env)),
        interfaces=(*_ports(), *_interfaces()),
        names=tuple(_name(host) for host in _some(names, own)),
        gpus=gpus,
        gpu_error=gpu_error,
        assigned=tuple(word for word in assigned.split(",") if word),
        shares_gpus=any(env.get(name) for name in SHARING),
        job=env.get("SLURM_JOB_ID", ""),
        xids=nvidia_smi.xids() if gpus or gpu_error else (),
        nccl=nccl_interface.ask(env, own, timeout_s / 2) if nccl_interface.is_used(env, backend) else None,
    )


def driver() -> str:
    """Return the GPUs' kernel driver with its version, such as 'nvidia 580.65.06' or 'amdgpu 6.12.12', or ''."""
    text = read_or_empty(Path("/proc/driver/nvidia/version"))
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 ...
    # NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build ...
    if found := re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text):
        return f"nvidia {found[1]}"
    version = read_or_empty(Path("/sys/module/amdgpu/version"))
    return f"amdgpu {version}" if version else ""


def numa_of(pci: str) -> str:
    """Return the NUMA node of a PCI device, such as '0'. Return '' if it has none (-1) or isn't a PCI device."""
    found = read_or_empty(Path(f"/sys/bus/pci/devices/{pci.lower()}/numa_node")) if pci else ""
    return "" if found == "-1" else found


def _memory() -> tuple[float, float]:
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_or_empty(Path("/proc/meminfo")), re.MULTILINE))
    return int(found.get("MemTotal", 0)) * 1024 / GB, int(found.get("MemAvailable", 0)) * 1024 / GB


def _places(env: Mapping[str, str]) -> Iterator[Place]:
    """Yield the free space of /dev/shm and of the folders for temporary files."""
    yield _place(SHARED_MEMORY, "/dev/shm")
    for what, path in (
        ("local disk", env.get(ENV_LOCAL_DISK, "")),
        ("TMPDIR", env.get("TMPDIR") or "/tmp"),
        ("scratch", env.get("SCRATCH", "")),
    ):
        if path:
            yield _place(what, path)


def _place(what: str, path: str) -> Place:
    """Check a folder by writing a file to it.

    The file isn't empty, because writing an empty file succeeds even on a full disk.
    """
    try:
        disk = os.statvfs(path)
        free, total = disk.f_bavail * disk.f_frsize / GB, disk.f_blocks * disk.f_frsize / GB
    except OSError as error:
        return Place(what, path, error=error.strerror or str(error), missing=isinstance(error, FileNotFoundError))
    try:
        with tempfile.NamedTemporaryFile(prefix=".hpcinit-", dir=path, buffering=0) as file:
            file.write(b"x" * 65536)
    except OSError as error:
        return Place(what, path, round(free, 2), round(total, 2), error.strerror or str(error))
    return Place(what, path, round(free, 2), round(total, 2))


def _interfaces() -> Iterator[Interface]:
    """Yield the node's network interfaces, except loopback, bridges and container interfaces."""
    for name in sorted(name for _, name in socket.if_nameindex()):
        if name == "lo" or name.startswith(("docker", "veth", "virbr", "br-")):
            continue
        place = Path("/sys/class/net") / name
        speed = read_or_empty(place / "speed")  # Mbit/s, or -1 if the driver does not know it
        gbit = int(speed) / 1000 if speed.isdigit() else 0.0
        # Some drivers report the state 'unknown'. In a network namespace without its own /sys, the states are those of
        # another namespace.
        yield Interface(name, read_or_empty(place / "operstate") not in {"down", "lowerlayerdown"}, gbit)


def _ports(place: Path = Path("/sys/class/infiniband")) -> Iterator[Interface]:
    """Yield the node's InfiniBand ports.

    The files of a port contain its state, such as '4: ACTIVE', and its rate, such as '200 Gb/sec (4X HDR)'.
    """
    for port in sorted(place.glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", read_or_empty(port / "rate"))
        up = read_or_empty(port / "state").startswith("4:")
        yield Interface(f"{port.parts[-3]}:{port.name}", up, float(rate[1]) if rate else 0.0, infiniband=True)


def _some(names: Sequence[str], own: str) -> list[str]:
    """Return all names, or a selection if there are many: the first, `own`, its neighbors, and evenly spaced others."""
    if len(names) <= MOST_NAMES:
        return list(names)
    at = names.index(own) if own in names else 0
    near = {names[0], names[at], names[(at + 1) % len(names)], names[at - 1]}
    near |= set(names[:: -(-len(names) // (MOST_NAMES - len(near)))])
    return [name for name in names if name in near]


def _name(host: str) -> Name:
    try:
        addresses = tuple(network.resolve(host))
    except OSError as error:
        return Name(host, error=error.strerror or str(error))
    try:
        back = socket.gethostbyaddr(addresses[0])[0]
    except OSError:
        back = ""
    return Name(host, addresses, back)
