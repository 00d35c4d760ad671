"""What the reports of the doctor's ranks show of their GPUs: foreign processes, ECC, PCIe, and the speed of copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from hpcinit.facts.checkup import BAD, OK, WARNING, Check
from hpcinit.facts.rank_report import Report

FOREIGN_MB = 1024  # of a GPU's memory; an idle driver takes less
SLOW_COPY = 0.5  # of the median of all devices
DIRECTIONS = ("to_device", "from_device", "on_device")


def of_devices(reports: Sequence[Report]) -> Iterator[Check]:
    """Everything below; nothing without reports of GPUs."""
    for judge in (_memory, _health, _copies):
        yield from judge(reports)


def _memory(reports: Sequence[Report]) -> Iterator[Check]:
    """Memory of the ranks' GPUs that was in use before the job used them."""
    pids = {(report.host, report.pid) for report in reports}
    seen: set[tuple[str, str]] = set()
    for report in reports:
        gpu = report.gpu
        if gpu is None or (report.host, gpu.uuid) in seen:
            continue
        seen.add((report.host, gpu.uuid))
        others = [one for one in gpu.processes if (report.host, one.pid) not in pids]
        names = ", ".join(
            f"{one.name} (process {one.pid}{'' if one.used_mb is None else f', {one.used_mb / 1024:.1f} GiB'})"
            for one in others
        )
        where = f"{report.host}: before this job used {gpu.uuid}, "
        if names:
            do = f"end it if it is yours: kill {others[0].pid} on {report.host}; otherwise tell the site"
            yield Check("devices' memory", WARNING, f"{where}its memory was in use by {names}", do)
        elif not gpu.processes and (gpu.used_mb or 0) > FOREIGN_MB:
            said = (
                f"{where}{(gpu.used_mb or 0) / 1024:.1f} GiB of its memory were in use, and nvidia-smi lists no process"
            )
            yield Check(
                "devices' memory", WARNING, said, "look for the process outside of this container, or tell the site"
            )


def _health(reports: Sequence[Report]) -> Iterator[Check]:
    """ECC errors, and PCIe links with fewer lanes than they could have."""
    told = [(report.host, report.gpu) for report in reports if report.gpu]
    healthy = True
    for host, gpu in told:
        if gpu.ecc_errors:
            healthy = False
            said = f"{host}: {gpu.uuid} had {gpu.ecc_errors:.0f} uncorrected ECC errors since its driver was loaded"
            yield Check("devices' health", BAD, said, "report the node to the site, which resets the GPU", (host,))
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            healthy = False
            said = f"{host}: the PCIe link of {gpu.uuid} has {gpu.pcie_width:.0f} lanes of {gpu.pcie_width_max:.0f}"
            yield Check("devices' health", WARNING, said, "report the node to the site: copies to this GPU are slow")
    if told and healthy:
        gpu = told[0][1]
        ecc = f"ECC {gpu.ecc.lower()}, no uncorrected error" if gpu.ecc else "ECC not reported"
        link = (
            f"PCIe generation {gpu.pcie_gen_max or 0:.0f} x{gpu.pcie_width or 0:.0f}" if gpu.pcie_width else "no PCIe"
        )
        clocks = f"SM clock {gpu.sm_mhz or 0:.0f} of {gpu.sm_max_mhz or 0:.0f} MHz before the job"
        yield Check("devices' health", OK, f"{ecc}; {link}; {clocks}")


def _copies(reports: Sequence[Report]) -> Iterator[Check]:
    """Each direction against the median of all devices; of one device the numbers are shown only."""
    told = [(report, report.copies) for report in reports if report.copies]
    usual = True
    for name in DIRECTIONS:
        speeds = [float(getattr(found, f"{name}_gb_s")) for _, found in told]
        for (report, _), speed in zip(told, speeds, strict=True):
            if speed < SLOW_COPY * median(speeds):
                usual = False
                said = f"{report.host}: rank {report.rank} copies {name.replace('_', ' ')} at {speed:.1f} GB/s, "
                said += f"the median device at {median(speeds):.1f} GB/s"
                yield Check("devices' copies", WARNING, said, "CPU binding and the PCIe link: nvidia-smi topo -m there")
    if told and usual:
        least = [min(getattr(found, f"{name}_gb_s") for _, found in told) for name in DIRECTIONS]
        said = f"at least {least[0]:.1f} GB/s to the device, {least[1]:.1f} GB/s from it and {least[2]:,.0f} GB/s on it"
        yield Check("devices' copies", OK, said)
