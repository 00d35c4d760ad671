"""The doctor's job: each rank reports its node and device, and measures the links to other ranks.

`hpcinit doctor cluster=x nodes=N` submits this job and reads the reports (records/rank_report.py).
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

import hpcinit
from hpcinit.base import versions
from hpcinit.node import node_probe
from hpcinit.records import rank_report, run_folder
from hpcinit.records.rank_report import MEASURED, MET, AllReduce, Copies, Link, Pair, Report
from hpcinit.world import World, launchers, visible_devices

# Each measurement is repeated and the best result counts, because noise only makes a result worse.
ROUNDS = 3  # each round measures all links, so that the measurements of one link are spread over time
TRIPS, TRANSFERS = 20, 3  # messages of 8 bytes, and transfers of the size below, per link and round
TRIES = 5  # repetitions of an all-reduce, a matrix product and a copy
# Bytes of the all-reduces, and of a transfer. They are small for gloo, which uses the CPUs of the node.
ON_CPU = ((1 << 10, 1 << 16, 1 << 20, 1 << 22), 1 << 20)
ON_DEVICE = ((1 << 10, 1 << 20, 1 << 25, 1 << 28), 1 << 26)
MATRIX = 8192  # rows and columns
PROBE_S = 30.0  # half of this time is for Slurm's commands, half for NCCL
COPIED = 1 << 28  # bytes of a copy: larger than the caches of any GPU


def main() -> None:
    world = launchers.read(os.environ)
    folder = Path(os.environ.get(run_folder.ENV_FOLDER) or ".")
    report = report_before_joining(world)  # before any rank uses a GPU
    rank_report.write(folder, report)
    with hpcinit.session() as run:
        device = device_of(run.device)
        numa = node_probe.numa_of(device.get("pci", ""))
        report = replace(report, stage=MET, backend=run.backend, device=device, numa=numa)
        rank_report.write(folder, report)
        report = measure_all(run, report)
        rank_report.write(folder, replace(report, stage=MEASURED))
        print(f"rank {run.rank}: measured", flush=True)


def report_before_joining(world: World) -> Report:
    """Return what this rank can report before it connects to the other ranks."""
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
        node=node_probe.probe(os.environ, host, world.hosts or (host,), "auto", PROBE_S)
        if not world.local_rank
        else None,
        pid=os.getpid(),
    )


def _nccl() -> str:
    if not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def device_of(device: torch.device) -> dict[str, str]:
    """Return what identifies a device: its 'device', and its name, memory_gb, uuid and pci if torch reports them."""
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


def measure_all(run: hpcinit.Runtime, report: Report) -> Report:
    """Return the report with all measurements added. Every rank must call this function."""
    sizes, transfer = ON_CPU if run.device.type == "cpu" else ON_DEVICE
    nodes = _nodes(run)
    report = replace(report, store_s=_store(run.rank), matmul_s=_matmul(run.device), copies=_copies(run.device))
    report = replace(report, links=_links(run, nodes, transfer))
    own = next(ranks for ranks in nodes if run.rank in ranks)
    report = replace(report, on_node=_on_node(run, own, sizes[-1]))
    found = tuple(all_reduce(run.device, size, None, run.world_size) for size in sizes)
    return replace(report, all_reduce=found if run.rank == 0 else ())


def _nodes(run: hpcinit.Runtime) -> list[list[int]]:
    """Return the ranks of each node, in the order of node_rank."""
    places: list[int] = [0] * run.world_size
    dist.all_gather_object(places, run.node_rank)
    return [[rank for rank, place in enumerate(places) if place == node] for node in sorted(set(places))]


def _store(rank: int) -> float:
    """Return how many seconds a read from torch's store takes."""
    store = distributed_c10d._get_default_store()
    store.set(f"hpcinit-doctor/{rank}", "x")
    return min(_timed(lambda: store.get(f"hpcinit-doctor/{rank}")) for _ in range(TRIPS))


def _matmul(device: torch.device) -> tuple[float, ...]:
    """Return how many seconds a matrix product takes in each round, or () on CPUs."""
    if device.type == "cpu":
        return ()
    matrix = torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    best = []
    for _ in range(ROUNDS):
        best.append(min(_timed(lambda: matrix @ matrix, device) for _ in range(TRIES)))
    return tuple(best)


def _copies(device: torch.device) -> Copies | None:
    """Copy data to, from and within the device, several times each. Return the best speed of each, or None on CPUs."""
    if device.type == "cpu":
        return None
    host = torch.ones(COPIED, dtype=torch.uint8, pin_memory=True)
    one, other = (torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    speeds = []
    for target, source in ((one, host), (host, one), (other, one)):
        target.copy_(source, non_blocking=True)  # the first copy warms up
        best = min(
            _timed(lambda to=target, of=source: to.copy_(of, non_blocking=True), device)  # type: ignore[misc]
            for _ in range(TRIES)
        )
        speeds.append(COPIED / best / 1e9)
    return Copies(*speeds)


def all_reduce(device: torch.device, size: int, group: ProcessGroup | None, ranks: int) -> AllReduce:
    """Measure an all-reduce of `size` bytes among the ranks of `group`.

    ranks: the number of ranks in the group.
    """
    value = torch.ones(size // 4, device=device)
    dist.all_reduce(value, group=group)  # the first all-reduce connects the ranks
    times = []
    for _ in range(TRIES):
        _barrier(device, group)
        times.append(_timed(lambda: dist.all_reduce(value, group=group), device))
        value.fill_(1)
    slowest = torch.tensor(times, device=device, dtype=torch.float32)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return AllReduce(size, float(slowest.min()), ranks)


def _on_node(run: hpcinit.Runtime, own: Sequence[int], size: int) -> AllReduce | None:
    """Measure an all-reduce among the ranks of this node. Return None unless this is the node's first rank.

    If the node has only one rank, or if it has all ranks of the job, measure nothing and return None.

    own: the ranks of this node.
    """
    if len(own) == 1 or len(own) == run.world_size:
        return None
    group = dist.new_group(list(own), use_local_synchronization=True)
    found = all_reduce(run.device, size, group, len(own))
    dist.destroy_process_group(group)
    return found if run.rank == own[0] else None


def _links(run: hpcinit.Runtime, nodes: Sequence[Sequence[int]], size: int) -> tuple[Link, ...]:
    """Return the links that this rank measured. A link is measured by the first of its two ranks."""
    found: dict[Pair, Link] = {}
    plan = rank_report.measurement_phases(rank_report.links_of_phase(nodes))
    for _ in range(ROUNDS):
        for phase in plan:
            _barrier(run.device)
            for pair in phase:
                if run.rank == pair.a:
                    found[pair] = _merged(found.get(pair), _measure_link(pair, run.device, size))
                elif run.rank == pair.b:
                    _send_back(pair, run.device, size)
    return tuple(found.values())


def _measure_link(pair: Pair, device: torch.device, size: int) -> Link:
    """Measure the round trip, the clock difference and the bandwidth of a link, on the first of its two ranks."""
    small, large = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(size // 4, device=device)
    best, ahead = float("inf"), 0.0
    for _ in range(TRIPS):
        before = time.time()
        took = _timed(lambda: _there_and_back(small, pair.b), device)
        if took < best:
            best, ahead = took, int(small.item()) / 1e6 - (before + took / 2)
    _there_and_back(large, pair.b)
    moved = min(_timed(lambda: _there_and_back(large, pair.b), device) for _ in range(TRANSFERS))
    return Link(pair.a, pair.b, pair.between_nodes, (best,), (2 * size / moved / 1e9,), ahead, best / 2)


def _send_back(pair: Pair, device: torch.device, size: int) -> None:
    """Reply to a small message of _measure_link() with this rank's time, and to a large one with the same data."""
    small, large = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(size // 4, device=device)
    for _ in range(TRIPS):
        dist.recv(small, pair.a)
        _wait(device)
        small.fill_(int(time.time() * 1e6))
        dist.send(small, pair.a)
    for _ in range(TRANSFERS + 1):
        dist.recv(large, pair.a)
        dist.send(large, pair.a)


def _there_and_back(value: torch.Tensor, to: int) -> None:
    dist.send(value, to)
    dist.recv(value, to)


def _barrier(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Wait for every rank of `group`.

    Pass `device` to NCCL, because otherwise NCCL might choose another device.
    """
    dist.barrier(group=group, device_ids=None if device.type == "cpu" else [device.index])


def _merged(before: Link | None, now: Link) -> Link:
    """Combine two measurements of a link. Of the two clock differences, keep the more exact one."""
    if before is None:
        return now
    closer = now if now.within_s < before.within_s else before
    return replace(closer, round_trip_s=before.round_trip_s + now.round_trip_s, gb_s=before.gb_s + now.gb_s)


def _timed(act: Callable[[], object], device: torch.device | None = None) -> float:
    """Return how many seconds `act` takes, including the work that it starts on `device`."""
    if device:
        _wait(device)
    started = time.perf_counter()
    act()
    if device:
        _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    main()
