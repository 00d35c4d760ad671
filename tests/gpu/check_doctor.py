"""Check that the doctor's job reports the device, and another process that uses its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hpcinit.base.versions import installed
from hpcinit.doctor import node_diagnosis
from hpcinit.node import node_findings
from hpcinit.records import rank_report
from hpcinit.records.check_results import Check
from hpcinit.records.node_facts import Gpu
from hpcinit.records.rank_report import MEASURED, Report
from tests.gpu import device, starting
from tests.gpu.findings import MISSING, NOT_SHOWN, Findings
from tests.gpu.starting import Job

COMMAND_NEEDS = ("hydra-core", "omegaconf", "submitit", "rich", "psutil")
USED_GB = 2
USE_MEMORY = f"""
import torch, time
kept = torch.empty({USED_GB} << 30, dtype=torch.uint8, device="cuda")
print("allocated", flush=True)
time.sleep(600)
"""


def main(found: Findings, folder: Path) -> None:
    report, checks = _doctor(found, folder / "alone")
    if report is not None:
        _report(found, report, checks)
    _another_process(found, folder)
    _command(found, folder)


def _doctor(found: Findings, folder: Path) -> tuple[Report | None, list[Check]]:
    done = starting.run(Job("tests.gpu.check_doctor:doctor"), folder)
    reports = rank_report.read(folder)
    measured = done.ok and bool(reports) and reports[0].stage == MEASURED
    if not found.claim(f"the doctor's job completes ({folder.name})", measured, "" if measured else done.tail()):
        return None, []
    return reports[0], list(node_diagnosis.check_nodes(reports, 1, 1))


def _report(found: Findings, report: Report, checks: list[Check]) -> None:
    of, copies = report.device, report.copies
    gpu = node_findings.of_device(report.node.gpus, of) if report.node else None
    found.claim("name, memory and UUID", bool(of.get("name") and of.get("uuid")), str(dict(of)), device=True)
    found.claim("driver", report.driver.startswith("nvidia "), report.driver or "not reported", device=True)
    found.measured("NUMA node", report.numa or "not reported: a virtual machine often has none", device=True)
    found.claim("nvidia-smi has the device", gpu is not None, str(gpu), device=True)
    ecc = f"{gpu.ecc or 'not reported'}, {gpu.ecc_errors} uncorrected" if gpu else ""
    _reported(found, "ECC", bool(gpu and gpu.ecc), ecc)
    clocks = (
        f"SM {gpu.sm_mhz} of {gpu.sm_max_mhz} MHz, memory {gpu.memory_mhz} of {gpu.memory_max_mhz} MHz" if gpu else ""
    )
    found.claim("clocks", bool(gpu and gpu.sm_mhz and gpu.sm_max_mhz), clocks, device=True)
    link = (
        f"generation {gpu.pcie_gen} of {gpu.pcie_gen_max}, {gpu.pcie_width} of {gpu.pcie_width_max} lanes"
        if gpu
        else ""
    )
    _reported(found, "PCIe link", bool(gpu and gpu.pcie_width), link)
    speeds = f"{copies.to_device_gb_s:.1f} GB/s to it, {copies.from_device_gb_s:.1f} GB/s from it, " if copies else ""
    speeds += f"{copies.on_device_gb_s:,.0f} GB/s on it" if copies else ""
    found.claim("bandwidth of copies", copies is not None, speeds, device=True)
    product = f"{1000 * min(report.matmul_s):.2f} ms" if report.matmul_s else ""
    found.claim("time of a matrix product", bool(report.matmul_s), product, device=True)
    found.measured("all its lines", "; ".join(f"{one.status} {one.about}: {one.detail}" for one in checks))


def _reported(found: Findings, name: str, there: bool, detail: str) -> None:
    """Report a value that nvidia-smi may not have: virtual machines lack some."""
    if there or found.cpu:
        found.claim(name, there, detail, device=True)
        return
    found.add(name, NOT_SHOWN, f"nvidia-smi does not report it here: {detail}")


def _another_process(found: Findings, folder: Path) -> None:
    """Start a process that uses memory of the device, like one that an earlier job left behind."""
    name = "another process that uses memory of the device is named"
    if found.cpu:
        return found.claim(name, False, "its diagnosis is tested with made-up output of nvidia-smi", device=True)
    holder = subprocess.Popen([sys.executable, "-c", USE_MEMORY], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        which = device.identity()
        listed = [one.pid for one in (device.look(which) or Gpu("")).processes]
        _, checks = _doctor(found, folder / "beside")
    finally:
        holder.kill()
        holder.wait()
    lines = [one.detail for one in checks if one.about == "devices' memory"]
    detail = f"process {holder.pid} used {USED_GB} GiB; nvidia-smi listed {listed}; the doctor: {'; '.join(lines)}"
    if not listed:
        found.claim("memory of a process that nvidia-smi does not list is reported", bool(lines), detail)
        return found.add(name, NOT_SHOWN, f"nvidia-smi lists no processes here, as in many containers; {detail}")
    found.claim(name, any("in use by" in line for line in lines), detail)
    return None


def _command(found: Findings, folder: Path) -> None:
    """Run the command itself, which needs the packages of a login node."""
    name = "hpcinit doctor cluster=local nodes=1"
    if missing := [package for package in COMMAND_NEEDS if not installed(package)]:
        return found.add(name, MISSING, f"{', '.join(missing)}; the doctor's job above needs none of them")
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "hpcinit", "doctor", "cluster=local", "nodes=1", "ranks_per_node=1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("fail", "devices", "warning"))]
    found.claim(name, done.returncode == 0, f"status {done.returncode}: {'; '.join(lines) or done.stderr[-300:]}")
    return None


# In the rank:


def doctor() -> Any:
    """Run the doctor's job."""
    from hpcinit.jobs import doctor as job

    job.main()
    return True
