"""The doctor's job: each rank reports its node and device, and measures the links to other ranks.

`hpcinit doctor cluster=x nodes=N` submits it and reads the reports (records/rank_report.py).
"""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import replace
from pathlib import Path

import torch

import hpcinit
from hpcinit.base import versions
from hpcinit.jobs import measure, node_probe
from hpcinit.records import rank_report, run_folder
from hpcinit.records.rank_report import MEASURED, MET, Report
from hpcinit.world import World, launchers, visible_devices


def main() -> None:
    world = launchers.read(os.environ)
    folder = Path(os.environ.get(run_folder.ENV_FOLDER) or ".")
    report = alone(world)
    rank_report.write(folder, report)
    gpus = node_probe.query_nvidia_smi()  # before this process uses a GPU itself
    with hpcinit.session() as run:
        device = device_of(run.device)
        numa = node_probe.numa_of(device.get("pci", ""))
        gpu = node_probe.of_device(gpus, device)
        report = replace(report, stage=MET, backend=run.backend, device=device, numa=numa, gpu=gpu)
        rank_report.write(folder, report)
        report = measure.everything(run, report)
        rank_report.write(folder, replace(report, stage=MEASURED))
        print(f"rank {run.rank}: measured", flush=True)


def alone(world: World) -> Report:
    """Return what a rank can report before it connects to the others."""
    host = world.host or socket.gethostname()
    return Report(
        rank=world.rank,
        local_rank=world.local_rank,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        host=host,
        job=world.job,
        hosts=world.hosts if world.local_rank == 0 else (),
        visible=tuple(visible_devices.given(os.environ)),
        driver=node_probe.driver(),
        cpus=len(os.sched_getaffinity(0)),
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "hpcinit": versions.installed("hpcinit"),
            "nccl": _nccl(),
        },
        node=node_probe.probe_node(os.environ, world.hosts, host) if world.local_rank == 0 else None,
        pid=os.getpid(),
    )


def _nccl() -> str:
    if not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def device_of(device: torch.device) -> dict[str, str]:
    """Return the device's identity: 'device', and name, memory_gb, uuid and pci if torch has them."""
    found = {"device": str(device)}
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
        found["name"] = str(properties.name)
        found["memory_gb"] = f"{getattr(properties, 'total_memory', 0) / 1e9:.0f}"
        if uuid := getattr(properties, "uuid", ""):
            found["uuid"] = str(uuid)
        if hasattr(properties, "pci_bus_id"):
            domain, bus, slot = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
            found["pci"] = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    return found


if __name__ == "__main__":
    main()
