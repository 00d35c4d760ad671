"""The device as nvidia-smi shows it: memory in use, and processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from hpcinit.node import node_findings, nvidia_smi
from hpcinit.records.node_facts import Gpu

# Prints the GPU's identity: "UUID PCI-address".
IDENTITY = """
import torch
p = torch.cuda.get_device_properties(0)
print(getattr(p, "uuid", "-"), f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0" if hasattr(p, "pci_bus_id") else "-")
"""


def identity() -> dict[str, str]:
    """Return UUID and PCI address of the visible GPU, from a short process; {} on CPUs."""
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return {}
    done = subprocess.run([sys.executable, "-c", IDENTITY], capture_output=True, text=True, timeout=120, check=False)
    words = done.stdout.split()
    return {"uuid": words[0].strip("-"), "pci": words[1].strip("-")} if len(words) == 2 else {}


def look(which: dict[str, str]) -> Gpu | None:
    """Return the current state of the GPU, or None if nvidia-smi does not report it."""
    return node_findings.of_device(nvidia_smi.query()[0], which)


def used_mb(which: dict[str, str]) -> float | None:
    """Return the MiB of the GPU's memory that are in use by all processes."""
    gpu = look(which)
    return gpu.used_mb if gpu else None


def settled_mb(which: dict[str, str], limit_s: float = 10.0) -> float | None:
    """Return the same after it has settled: the driver frees a dead process's memory with a delay."""
    before = used_mb(which)
    deadline = time.monotonic() + limit_s
    while before is not None and time.monotonic() < deadline:
        time.sleep(0.5)
        now = used_mb(which)
        if now is None or now >= before:
            return before
        before = now
    return before


def cuda_files(pid: int) -> list[str]:
    """Return the files of the NVIDIA driver that a process has open (/dev/nvidia0, /dev/nvidia-uvm), [] if not visible."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(entry.readlink()))
    return sorted(target for target in found if target.startswith("/dev/nvidia"))
