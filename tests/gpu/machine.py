"""A description of this machine and this Python: `python -m tests.gpu.machine` prints it as one line of JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "numpy", "deepspeed", "transformers", "triton", "hydra-core", "psutil", "rich", "pytest")
QUERIED = "name,uuid,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,power.limit,clocks.max.sm"


def look() -> dict[str, Any]:
    """Return date, hardware, driver and versions. Imports torch and creates a CUDA context."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "hpcinit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "not a git checkout",
        "python": f"{platform.python_version()} ({sys.executable})",
        "kernel": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "memory": _memory(),
        "versions": {name: _version(name) for name in PACKAGES},
        "nvcc": _output("nvcc", "--version").splitlines()[-1:] or "not found",
        "g++": _output("g++", "--version").splitlines()[:1] or "not found",
        "ninja": shutil.which("ninja") or "not found",
        "nvidia-smi": _output("nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader").splitlines(),
        "gpus": 0,
    }
    try:
        import torch
    except ImportError as error:
        return {**found, "problem": f"cannot import torch: {error}"}
    found["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        why = "torch finds no CUDA device" if built else f"torch {torch.__version__} is built without CUDA"
        return {**found, "problem": why}
    found["gpus"] = torch.cuda.device_count()
    of = torch.cuda.get_device_properties(0)
    found["gpu"] = f"{of.name}, {of.total_memory / 1e9:.1f} GB, compute capability {of.major}.{of.minor}"
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    try:
        model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model = None
    return f"{len(os.sched_getaffinity(0))} cores, {model[1] if model else platform.machine()}"


def _memory() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB"


if __name__ == "__main__":
    print(json.dumps(look()))
