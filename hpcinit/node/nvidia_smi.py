"""Queries nvidia-smi, and reads NVIDIA's driver errors (Xid) from the kernel's log. Unknown values are empty."""

from __future__ import annotations

import pwd
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcinit.records.node_facts import Gpu, GpuProcess, Xid

TIMED_OUT = 124  # the exit status that timeout(1) returns after the timeout
TIMEOUT_S = 30.0  # long, because without persistence mode, each call loads the driver
# "nvidia-smi --help-query-gpu" describes these fields. Older drivers lack some: R535 renamed the reasons of the clocks,
# R450 added MIG, and R570 added the recovery action.
FIELDS = (
    "uuid", "pci.bus_id", "memory.used", "memory.total", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total",
    "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem",
    "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
    "clocks_event_reasons.active", "clocks_throttle_reasons.active", "mig.mode.current", "gpu_recovery_action",
)  # fmt: skip
NUMBERS = {
    "used_mb": "memory.used", "total_mb": "memory.total", "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "sm_mhz": "clocks.sm", "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem", "memory_max_mhz": "clocks.max.mem",
    "pcie_gen": "pcie.link.gen.current", "pcie_gen_max": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current", "pcie_width_max": "pcie.link.width.max",
}  # fmt: skip
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")  # the name last: it may contain a comma
_NO_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
# [1234.5] NVRM: Xid (PCI:0000:ae:00): 79, pid=4242, name=python3, GPU has fallen off the bus.
_XID = re.compile(r"^\[ *(\d+\.\d+)\] .*?NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+), (.*)$", re.MULTILINE)


def query() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that nvidia-smi lists, and its error message, or '' if there is none.

    CUDA_VISIBLE_DEVICES has no effect on the list. nvidia-smi creates no CUDA context. In a container, it may list
    processes of other containers, or none. If nvidia-smi does not exist, return no GPUs and no message.
    """
    fields = list(FIELDS)
    while True:
        status, text = _run("gpu", fields)
        unknown = _NO_FIELD.search(text)
        if status == 0 or not unknown or unknown[1] not in fields:
            break
        fields.remove(unknown[1])
    if status == 0:
        return parse(fields, text, _run("compute-apps", PROCESS_FIELDS)[1]), ""
    if status is None:
        return (), ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (), lines[-1] if lines else f"exit status {status}"  # GPUs may be listed before the error


def pids(timeout_s: float) -> set[int] | None:
    """Return the ids of the processes that use a GPU of this node.

    Return None if nvidia-smi does not answer in time or is killed. The set is empty if nvidia-smi does not exist or
    fails.
    """
    status, text = _run("compute-apps", ("pid",), timeout_s)
    if status == TIMED_OUT or (status is not None and status < 0):
        return None
    return {int(_number(line.strip()) or 0) for line in text.splitlines()} if status == 0 else set()


def parse(fields: Sequence[str], gpus: str, processes: str) -> tuple[Gpu, ...]:
    """Return the GPUs listed in nvidia-smi's output (csv,noheader,nounits).

    fields: the columns of `gpus`.
    gpus: the output of --query-gpu.
    processes: the output of --query-compute-apps.
    """
    running: dict[str, list[GpuProcess]] = {}
    for cells in _rows(processes, len(PROCESS_FIELDS)):
        pid = int(_number(cells[1]) or 0)
        job, user = _job_and_user(pid)
        running.setdefault(cells[0], []).append(GpuProcess(pid, cells[3], _number(cells[2]), job, user))
    rows = [dict(zip(fields, cells, strict=True)) for cells in _rows(gpus, len(fields))]
    return tuple(_gpu(row, tuple(running.get(row["uuid"], ()))) for row in rows)


def _gpu(row: Mapping[str, str], processes: tuple[GpuProcess, ...]) -> Gpu:
    ecc, recovery = row["ecc.mode.current"], row.get("gpu_recovery_action", "")
    reasons = [row.get(name, "") for name in ("clocks_event_reasons.active", "clocks_throttle_reasons.active")]
    return Gpu(
        row["uuid"],
        # torch prints 0000:3b:00.0, and nvidia-smi prints 00000000:3B:00.0.
        pci=re.sub(r"^0000(?=[0-9a-f]{4}:)", "", row["pci.bus_id"].lower()),
        ecc=ecc if ecc in {"Enabled", "Disabled"} else "",
        **{name: _number(row[field]) for name, field in NUMBERS.items()},
        processes=processes,
        slowed=next((int(text, 16) for text in reasons if re.fullmatch(r"0x[0-9a-fA-F]+", text)), 0),
        mig=row.get("mig.mode.current") == "Enabled",
        recovery="" if recovery == "None" or recovery.startswith("[") else recovery,
    )


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",", width - 1)] for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _number(cell: str) -> float | None:
    """Return the number in the cell, or None for '[N/A]', '[Not Supported]' and so on."""
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def _run(of: str, fields: Sequence[str], timeout_s: float = TIMEOUT_S) -> tuple[int | None, str]:
    """Return the exit status and the output of nvidia-smi. The status is None if nvidia-smi does not exist."""
    command = ["nvidia-smi", f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except OSError:
        return None, ""
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f"nvidia-smi did not answer in {timeout_s:g} s"
    return done.returncode, done.stdout + done.stderr if done.returncode else done.stdout


def _job_and_user(pid: int) -> tuple[str, str]:
    """Return (job, '') for a process, or ('', user) if its environment shows no Slurm job or can't be read."""
    with suppress(OSError):
        found = re.search(rb"(?:^|\0)SLURM_JOB_ID=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
        if found:
            return found[1].decode(errors="replace"), ""
    try:
        return "", pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
    except OSError:
        return "", "user unknown"
    except KeyError:
        return "", "another user"


def xids() -> tuple[Xid, ...]:
    """Return the NVIDIA driver's errors since the node booted, or () if this user may not read the kernel's log."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = _XID.findall(done.stdout) if done.returncode == 0 else []
    return tuple(Xid(int(number), pci.lower(), text, max(now - float(at), 0.0)) for at, pci, number, text in found)
