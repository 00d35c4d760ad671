"""Check nodes and devices by the reports of the doctor's ranks. Links are in link_diagnosis.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from hpcinit.base.text import ranges
from hpcinit.doctor.check_results import FAIL, OK, WARNING, Check
from hpcinit.records.rank_report import MEASURED, Place, Report

# What the reports of the doctor's ranks show of their GPUs: foreign processes, ECC, PCIe, and the speed of copies.

FOREIGN_MB = 1024  # of a GPU's memory; an idle driver takes less
SLOW_COPY = 0.5  # of the median of all devices
DIRECTIONS = ("to_device", "from_device", "on_device")


def check_devices(reports: Sequence[Report]) -> Iterator[Check]:
    """Everything below; nothing without reports of GPUs."""
    for judge in (_device_memory, _health, _copies):
        yield from judge(reports)


def _device_memory(reports: Sequence[Report]) -> Iterator[Check]:
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
            yield Check("devices' health", FAIL, said, "report the node to the site, which resets the GPU", (host,))
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


# DataLoader's workers and NCCL put things there; containers have 64 MB unless told otherwise (docker --shm-size).
LEAST_SHARED_GB, LITTLE_SHARED_GB, LITTLE_DISK_GB = 0.0625, 1.0, 1.0
LITTLE_MEMORY = 0.1  # of the node's, available before anything has begun
SLOW_STORE_S = 0.25
SHARED_MEMORY = "shared memory"  # jobs/node_probe.py


def check_nodes(reports: Sequence[Report], nodes: int, ranks_per_node: int) -> Iterator[Check]:
    """nodes, ranks_per_node: as submitted."""
    yield from _presence(reports, nodes, ranks_per_node)
    if not reports:
        return
    for judge in (
        _devices,
        check_devices,
        _differences,
        _names,
        _interfaces,
        _places,
        _memory,
        _store,
    ):
        yield from judge(reports)


def hosts_of(reports: Sequence[Report], nodes: int) -> tuple[str, ...]:
    """By node; '' where nobody has said."""
    told = next((report.hosts for report in reports if report.hosts), ())
    return told or ("",) * nodes


def _presence(reports: Sequence[Report], nodes: int, ranks_per_node: int) -> Iterator[Check]:
    """hpcinit lays ranks out node by node: rank r is on node r // ranks_per_node."""
    hosts, total = hosts_of(reports, nodes), nodes * ranks_per_node
    here = {report.rank for report in reports}
    missing = [rank for rank in range(total) if rank not in here]
    for node in sorted({rank // ranks_per_node for rank in missing}):
        lost = [rank for rank in missing if rank // ranks_per_node == node]
        host = hosts[node] if node < len(hosts) else ""
        whole = len(lost) == ranks_per_node
        said = f"{f'{host}: ' if host else ''}{_ranks(lost)} never began" + (", none of the node's did" * whole)
        # Of all nodes at once: nobody's fault in particular (a module, an image, the time limit).
        blamed = (host,) if host and whole and here else ()
        yield Check("ranks", FAIL, said, "what Slurm and the job say of it stands below", blamed)
    stuck = [report for report in reports if report.stage != MEASURED]
    for stage in dict.fromkeys(report.stage for report in stuck):
        ranks = [report.rank for report in stuck if report.stage == stage]
        yield Check("ranks", FAIL, f"{_ranks(ranks)} came no further than {stage!r}", "what the job says stands below")
    if not missing and not stuck:
        yield Check("ranks", OK, f"{total} on {nodes} node{'s' * (nodes != 1)} have met and measured")


def _devices(reports: Sequence[Report]) -> Iterator[Check]:
    found: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        identity = report.device.get("uuid") or report.device.get("pci", "")
        if identity:
            found.setdefault((report.host, identity), []).append(report.rank)
    double = {key: ranks for key, ranks in found.items() if len(ranks) > 1}
    for (host, identity), ranks in double.items():
        do = "launch.gpu_bind or the job's own CUDA_VISIBLE_DEVICES gives ranks the same GPU: leave it to hpcinit"
        yield Check("devices", FAIL, f"{host}: {_ranks(ranks)} have the same device, {identity}", do)
    unseen = [report for report in reports if report.visible and report.device.get("device") == "cpu"]
    if unseen:
        versions = Counter(report.versions.get("torch", "?") for report in unseen)
        said = f"{_ranks([report.rank for report in unseen])} have GPUs by {unseen[0].visible[0].partition('=')[0]}, "
        said += f"and torch {versions.most_common(1)[0][0]} finds none"
        yield Check("devices", WARNING, said, "a build of torch for these GPUs, and their driver; or ask for no GPUs")
    if not double and not unseen:
        kinds = Counter(report.device.get("name", report.device.get("device", "?")) for report in reports)
        yield Check("devices", OK, ", ".join(f"{amount} x {name}" for name, amount in kinds.most_common()))


# What should be the same everywhere, and how it is called.
SAME: Mapping[str, Callable[[Report], str]] = {
    "device's name": lambda one: one.device.get("name", one.device.get("device", "")),
    "device's memory": lambda one: one.device.get("memory_gb", ""),
    "driver": lambda one: one.driver,
    "cores of a rank": lambda one: str(one.cpus),
    "torch": lambda one: one.versions.get("torch", ""),
    "NCCL": lambda one: one.versions.get("nccl", ""),
    "Python": lambda one: one.versions.get("python", ""),
    "hpcinit": lambda one: one.versions.get("hpcinit", ""),
    "kernel": lambda one: one.node.kernel if one.node else "",
    "memory": lambda one: f"{one.node.memory_gb:.0f} GB" if one.node else "",
}


def _differences(reports: Sequence[Report]) -> Iterator[Check]:
    """Each node whose ranks say something else than most."""
    different = False
    for what, value in SAME.items():
        told = [(report.host, value(report)) for report in reports]
        told = [(host, said) for host, said in told if said]
        if len({said for _, said in told}) < 2:
            continue
        different = True
        [(usual, _)] = Counter(said for _, said in told).most_common(1)
        others: dict[str, list[str]] = {}
        for host, said in dict.fromkeys(told):
            if said != usual:
                others.setdefault(said, []).append(host)
        said = "; ".join(f"{', '.join(dict.fromkeys(hosts))}: {other}" for other, hosts in others.items())
        yield Check(what, WARNING, f"{said}; most have {usual}", "nodes of one kind: a partition or a constraint")
    if not different:
        yield Check("alike", OK, f"{', '.join(list(SAME)[:-1])} and {list(SAME)[-1]} are the same everywhere")


def _names(reports: Sequence[Report]) -> Iterator[Check]:
    """Every node must find every other; the way back from an address to a name is not needed, but must not lie."""
    lookers = [report for report in reports if report.node and report.node.names]
    well = True
    several = len({report.host for report in reports}) > 1
    for report in lookers:
        assert report.node
        known = {name.host for name in report.node.names}
        failed = [name for name in report.node.names if name.error]
        if failed:
            well = False
            said = f"{report.host} cannot look up {', '.join(name.host for name in failed)}: {failed[0].error}"
            yield Check("names", FAIL, said, "have them added to DNS or /etc/hosts there, or cluster.host_template=...")
        own = next((name for name in report.node.names if name.host == report.host), None)
        if several and own and own.addresses and all(_loopback(address) for address in own.addresses):
            well = False
            do = "take the name off that line of /etc/hosts: other nodes cannot connect to it"
            yield Check("names", WARNING, f"{report.host} is {', '.join(own.addresses)} on {report.host} itself", do)
        for name in report.node.names:
            short = name.back.partition(".")[0]
            if short in known and short != name.host.partition(".")[0] and not _loopback(name.addresses[0]):
                well = False
                said = f"on {report.host}, {name.host} is {name.addresses[0]}, and that is called {name.back}"
                yield Check("names", WARNING, said, "two nodes share an address, or the reverse zone is wrong")
    if lookers and well:
        yield Check("names", OK, f"each of {len(lookers)} nodes finds the others, and no address leads elsewhere")


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interfaces(reports: Sequence[Report]) -> Iterator[Check]:
    told = {report.host: report.node.interfaces for report in reports if report.node}
    common = Counter(one.name for found in told.values() for one in found if one.up)
    usual = {name for name, amount in common.items() if amount > len(told) / 2}
    well = True
    for host, found in told.items():
        if lost := sorted(usual - {one.name for one in found if one.up}):
            well = False
            do = f"the adapter or its cable: `ip link` or `ibstat` on {host}"
            yield Check("interfaces", WARNING, f"{host}: {', '.join(lost)} not up, as on most nodes", do)
        if down := [one.name for one in found if one.infiniband and not one.up and one.name not in usual]:
            well = False
            yield Check("interfaces", WARNING, f"{host}: InfiniBand port {', '.join(down)} not active", "ibstat")
    if told and well:
        some = next(iter(told.values()))
        names = [f"{one.name}{f' {one.gbit:g} Gbit/s' if one.gbit else ''}" for one in some if one.up]
        yield Check("interfaces", OK, f"{', '.join(names) or 'none'}, up on each node")


def _places(reports: Sequence[Report]) -> Iterator[Check]:
    well: dict[str, list[float]] = {}
    for report in reports:
        for place in report.node.places if report.node else ():
            grade = _grade(place)
            if grade == OK:
                well.setdefault(place.what, []).append(place.free_gb)
                continue
            why = f"cannot be written: {place.error}, " * bool(place.error)
            said = f"{report.host}: {place.path}, {why}{place.free_gb:.2f} GB free of {place.total_gb:.2f} GB"
            do = "what other jobs left there: ask the site; in a container a larger /dev/shm (--ipc=host, --shm-size)"
            blamed = (report.host,) if grade == FAIL and place.what != "scratch" else ()
            yield Check(place.what, grade, said, do if place.what == SHARED_MEMORY else "free some space", blamed)
    for what, free in well.items():
        yield Check(what, OK, f"at least {min(free):.1f} GB free on {len(free)} node{'s' * (len(free) != 1)}")


def _grade(place: Place) -> str:
    shared = place.what == SHARED_MEMORY
    if place.error or (shared and place.free_gb < LEAST_SHARED_GB):
        return FAIL
    return WARNING if place.free_gb < (LITTLE_SHARED_GB if shared else LITTLE_DISK_GB) else OK


def _memory(reports: Sequence[Report]) -> Iterator[Check]:
    told = {one.host: one.node for one in reports if one.node and one.node.memory_gb}
    little = {host: node for host, node in told.items() if node.available_gb < LITTLE_MEMORY * node.memory_gb}
    for host, node in little.items():
        said = f"{host}: {node.available_gb:.1f} GB available of {node.memory_gb:.0f} GB, before anything has begun"
        yield Check("memory", WARNING, said, "another job shares the node, or one has left something behind")
    if told and not little:
        least = min(node.available_gb for node in told.values())
        yield Check("memory", OK, f"at least {least:.0f} GB available on each node")


def _store(reports: Sequence[Report]) -> Iterator[Check]:
    told = {report.rank: report.store_s for report in reports if report.store_s}
    late = [rank for rank, seconds in told.items() if seconds > SLOW_STORE_S]
    if late:
        said = f"rank 0's store answers {_ranks(late)} in {max(told.values()):.2f} s"
        yield Check("store", WARNING, said, "rank 0's node is busy, or the way to it slow")
    elif told:
        yield Check("store", OK, f"rank 0's store answers each rank within {max(told.values()) * 1e6:.0f} us")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
