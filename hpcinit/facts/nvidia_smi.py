"""What nvidia-smi reports of the GPUs of this node: memory, processes, ECC, clocks and the PCIe link."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from hpcinit.facts.rank_report import Gpu, GpuProcess

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


def look() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists, whatever CUDA_VISIBLE_DEVICES is; () where it fails or is missing.

    It creates no CUDA context. In a container it may list processes of other containers, or none.
    """
    return parse(_output("gpu", FIELDS), _output("compute-apps", PROCESS_FIELDS))


def of_device(gpus: Sequence[Gpu], device: Mapping[str, str]) -> Gpu | None:
    """Return the GPU with the UUID or PCI address of `device` (jobs.doctor.device_of), None if there is none."""
    # torch: 8932f937-..., nvidia-smi: GPU-8932f937-...; torch: 0000:3b:00.0, nvidia-smi: 00000000:3B:00.0
    uuid, pci = device.get("uuid", "").removeprefix("GPU-"), device.get("pci", "").lower()
    for gpu in gpus:
        if (uuid and gpu.uuid.removeprefix("GPU-") == uuid) or (pci and gpu.pci == pci):
            return gpu
    return None


def parse(gpus: str, processes: str) -> tuple[Gpu, ...]:
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
    """None for '[N/A]', '[Not Supported]' and the like."""
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def _output(of: str, fields: Sequence[str]) -> str:
    command = ["nvidia-smi", f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
