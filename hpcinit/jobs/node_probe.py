"""Probe this node through /proc, /sys, the resolver and nvidia-smi (Linux). Unknown values are empty."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcinit.base.safe_files import read_or_empty
from hpcinit.records.rank_report import Gpu, GpuProcess, Interface, Name, Node, Place
from hpcinit.records.scratch import ENV_LOCAL_DISK
from hpcinit.world import network

GB = 2**30
MOST_NAMES = 64  # in a large job, resolving every name on every node would overload DNS
SHARED_MEMORY = "shared memory"


def probe_node(env: Mapping[str, str], names: Sequence[str], own: str) -> Node:
    """Return the probe of this node. names: of the job's nodes. own: this node's name."""
    total, available = _memory()
    return Node(
        memory_gb=round(total, 1),
        available_gb=round(available, 1),
        kernel=platform.release(),
        places=tuple(folders(env)),
        interfaces=(*_ports(), *_interfaces()),
        names=tuple(_name(host) for host in _some(names, own)),
    )


def driver() -> str:
    """Return the version of the GPUs' kernel driver: 'nvidia 580.65.06', 'amdgpu 6.12.12'; '' without one."""
    text = read_or_empty(Path("/proc/driver/nvidia/version"))
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 ...
    # NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build ...
    if found := re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text):
        return f"nvidia {found[1]}"
    version = read_or_empty(Path("/sys/module/amdgpu/version"))
    return f"amdgpu {version}" if version else ""


def numa_of(pci: str) -> str:
    """Return the NUMA node of a PCI device, for example '0'; '' if it has none (-1) or is not a PCI device."""
    found = read_or_empty(Path(f"/sys/bus/pci/devices/{pci.lower()}/numa_node")) if pci else ""
    return "" if found == "-1" else found


def _memory() -> tuple[float, float]:
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_or_empty(Path("/proc/meminfo")), re.MULTILINE))
    return int(found.get("MemTotal", 0)) * 1024 / GB, int(found.get("MemAvailable", 0)) * 1024 / GB


def folders(env: Mapping[str, str]) -> Iterator[Place]:
    """Yield /dev/shm and the folders for temporary files, with their free space."""
    yield _place(SHARED_MEMORY, "/dev/shm")
    for what, path in (
        ("local disk", env.get(ENV_LOCAL_DISK, "")),
        ("TMPDIR", env.get("TMPDIR") or "/tmp"),
        ("scratch", env.get("SCRATCH", "")),
    ):
        if path:
            yield _place(what, path)


def _place(what: str, path: str) -> Place:
    """Check a folder by writing a file. It has content, because an empty file needs no space."""
    try:
        disk = os.statvfs(path)
        free, total = disk.f_bavail * disk.f_frsize / GB, disk.f_blocks * disk.f_frsize / GB
    except OSError as error:
        return Place(what, path, error=error.strerror or str(error))
    try:
        with tempfile.NamedTemporaryFile(prefix=".hpcinit-", dir=path, buffering=0) as file:
            file.write(b"x" * 65536)
    except OSError as error:
        return Place(what, path, round(free, 2), round(total, 2), error.strerror or str(error))
    return Place(what, path, round(free, 2), round(total, 2))


def _interfaces() -> Iterator[Interface]:
    """Yield the network interfaces, without loopback and those of containers and bridges."""
    for name in network.interface_names():
        if name == "lo" or name.startswith(("docker", "veth", "virbr", "br-")) or ":" in name:
            continue
        place = Path("/sys/class/net") / name
        speed = read_or_empty(place / "speed")  # Mbit/s; -1 where the driver does not know
        gbit = int(speed) / 1000 if speed.isdigit() else 0.0
        # Some drivers report the state 'unknown'. A network namespace without its own /sys shows another one's states.
        yield Interface(name, read_or_empty(place / "operstate") not in {"down", "lowerlayerdown"}, gbit)


def _ports(place: Path = Path("/sys/class/infiniband")) -> Iterator[Interface]:
    """Yield the InfiniBand ports; their files contain state '4: ACTIVE' and rate '200 Gb/sec (4X HDR)'."""
    for port in sorted(place.glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", read_or_empty(port / "rate"))
        up = read_or_empty(port / "state").startswith("4:")
        yield Interface(f"{port.parts[-3]}:{port.name}", up, float(rate[1]) if rate else 0.0, infiniband=True)


def _some(names: Sequence[str], own: str) -> list[str]:
    """Return all names, or of many: its own, the first, its neighbors, and others at even distances."""
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


# nvidia-smi: memory, processes, ECC, clocks and the PCIe link of each GPU of this node.

TIMEOUT_S = 30.0  # without persistence mode the driver is loaded for each call
# In the order of Gpu's fields. "nvidia-smi --help-query-gpu" describes them.
FIELDS = (
    "uuid", "pci.bus_id", "memory.used", "memory.total", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total",
    "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem",
    "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
NUMBERS = (
    "ecc_errors", "sm_mhz", "sm_max_mhz", "memory_mhz", "memory_max_mhz",
    "pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max",
)  # fmt: skip
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")  # the name last: it may contain a comma


def query_nvidia_smi() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists, whatever CUDA_VISIBLE_DEVICES is; () where it fails or is missing.

    It creates no CUDA context. In a container it may list processes of other containers, or none.
    """
    return parse_nvidia_smi(_output("gpu", FIELDS), _output("compute-apps", PROCESS_FIELDS))


def of_device(gpus: Sequence[Gpu], device: Mapping[str, str]) -> Gpu | None:
    """Return the GPU with the UUID or PCI address of `device` (jobs.doctor.device_of), None if there is none."""
    # torch: 8932f937-..., nvidia-smi: GPU-8932f937-...; torch: 0000:3b:00.0, nvidia-smi: 00000000:3B:00.0
    uuid, pci = device.get("uuid", "").removeprefix("GPU-"), device.get("pci", "").lower()
    for gpu in gpus:
        if (uuid and gpu.uuid.removeprefix("GPU-") == uuid) or (pci and gpu.pci == pci):
            return gpu
    return None


def parse_nvidia_smi(gpus: str, processes: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of --query-gpu and --query-compute-apps, as csv,noheader,nounits."""
    running: dict[str, list[GpuProcess]] = {}
    for cells in _rows(processes, len(PROCESS_FIELDS)):
        running.setdefault(cells[0], []).append(GpuProcess(int(_number(cells[1]) or 0), cells[3], _number(cells[2])))
    return tuple(_gpu(cells, tuple(running.get(cells[0], ()))) for cells in _rows(gpus, len(FIELDS)))


def _gpu(cells: Sequence[str], processes: tuple[GpuProcess, ...]) -> Gpu:
    uuid, pci, used, total, ecc, *numbers = cells
    pci = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", pci.lower())
    ecc = ecc if ecc in {"Enabled", "Disabled"} else ""
    found = dict(zip(NUMBERS, map(_number, numbers), strict=True))
    return Gpu(uuid, pci, _number(used), _number(total), ecc, **found, processes=processes)


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",", width - 1)] for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _number(cell: str) -> float | None:
    """Return the number in the cell; None for '[N/A]', '[Not Supported]' and the like."""
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def _output(of: str, fields: Sequence[str]) -> str:
    command = ["nvidia-smi", f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
