"""Checks nodes and devices, using the reports of the doctor's ranks. link_diagnosis.py checks the links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from hpcinit.base.text import counted, rank_names
from hpcinit.node.node_findings import gpus_of_job, nccl_findings, node_findings
from hpcinit.records.check_results import FAIL, OK, WARNING, Check
from hpcinit.records.node_facts import Node
from hpcinit.records.rank_report import MEASURED, Report

# GPUs: processes of other jobs, ECC, PCIe, and the speed of copies.

SLOW_COPY = 0.5  # as a fraction of the median of all devices
DIRECTIONS = ("to_device", "from_device", "on_device")


def check_devices(reports: Sequence[Report]) -> Iterator[Check]:
    """Yield the checks of the GPUs. If no GPU has a problem, one check counts them."""
    gpus = [gpu for _, node, ranks in _nodes(reports) for gpu in gpus_of_job(node, _devices_of(ranks))]
    found = [check for _, check in _of_each_node(reports) if check.about == "devices' health"]
    if gpus and not found:
        yield Check("devices' health", OK, f"no fault on {counted(len(gpus), 'GPU')}")
    yield from _copies(reports)


def _nodes(reports: Sequence[Report]) -> Iterator[tuple[str, Node, list[Report]]]:
    """Yield each node that reported its facts, with the reports of its ranks."""
    for report in reports:
        if report.node:
            yield report.host, report.node, [one for one in reports if one.host == report.host]


def _devices_of(ranks: Sequence[Report]) -> list[Mapping[str, str]]:
    return [one.device for one in ranks]


def _of_each_node(reports: Sequence[Report]) -> Iterator[tuple[str, Check]]:
    """Yield each finding that concerns a single node, with the node's host.

    hpcinit also prints these findings when it checks a node before the ranks start.
    """
    for host, node, ranks in _nodes(reports):
        pids = [one.pid for one in ranks]
        for check in node_findings(node, _devices_of(ranks), pids, max(one.world_size for one in ranks)):
            yield host, check


def _findings(reports: Sequence[Report]) -> Iterator[Check]:
    """Yield the problems of each node.

    For each kind of folder, such as TMPDIR, also yield a check that counts the nodes with enough space.
    """
    enough: dict[str, list[float]] = {}
    space = {(host, place.what): place.free_gb for host, node, _ in _nodes(reports) for place in node.places}
    for host, check in _of_each_node(reports):
        if check.status == OK and (free := space.get((host, check.about))):
            enough.setdefault(check.about, []).append(free)
            continue
        # All nodes share the scratch folder, so a full one is not the fault of a node.
        faulty = (host,) if check.status == FAIL and check.about != "scratch" else ()
        yield replace(check, detail=f"{host}: {check.detail}", hosts=faulty)
    for about, free_gb in enough.items():
        yield Check(about, OK, f"at least {min(free_gb):.1f} GB free on {counted(len(free_gb), 'node')}")


def _nccl(reports: Sequence[Report], nodes: int) -> Iterator[Check]:
    """Yield the problems with the interfaces that NCCL uses. If there are none, yield a check with their names."""
    found = [node.nccl for _, node, _ in _nodes(reports) if node.nccl]
    faults = list(nccl_findings(found, nodes))
    yield from faults
    if found and not faults:
        names = ", ".join(dict.fromkeys(one.interface for one in found))
        slowest = max(one.seconds for one in found)
        where = f"on {counted(len(found), 'node')} (NCCL answered within {slowest:.2f} s)"
        detail = f"NCCL {found[0].version} uses {names} {where}"
        yield Check("NCCL's interface", OK, detail)


def _copies(reports: Sequence[Report]) -> Iterator[Check]:
    """Yield a check for each device whose copies are much slower than the median device's.

    With only one device, there is nothing to compare.
    """
    measured = [(report, report.copies) for report in reports if report.copies]
    usual = True
    for name in DIRECTIONS:
        speeds = [float(getattr(found, f"{name}_gb_s")) for _, found in measured]
        for (report, _), speed in zip(measured, speeds, strict=True):
            if speed < SLOW_COPY * median(speeds):
                usual = False
                detail = f"{report.host}: rank {report.rank} copies {name.replace('_', ' ')} at {speed:.1f} GB/s, "
                detail += f"but the median device copies at {median(speeds):.1f} GB/s"
                advice = "check CPU binding and the PCIe link on that node: nvidia-smi topo -m"
                yield Check("devices' copies", WARNING, detail, advice)
    if measured and usual:
        least = [min(getattr(found, f"{name}_gb_s") for _, found in measured) for name in DIRECTIONS]
        detail = (
            f"at least {least[0]:.1f} GB/s to the device, {least[1]:.1f} GB/s from it and {least[2]:,.0f} GB/s on it"
        )
        yield Check("devices' copies", OK, detail)


LITTLE_MEMORY = 0.1  # as a fraction of the node's memory, before the program starts
SLOW_STORE_S = 0.25


def check_nodes(reports: Sequence[Report], nodes: int, ranks_per_node: int) -> Iterator[Check]:
    """Yield the checks of nodes and devices.

    nodes, ranks_per_node: what the submitted job requested.
    """
    yield from _presence(reports, nodes, ranks_per_node)
    if not reports:
        return
    for check in (_devices, check_devices, _differences, _names, _interfaces, _findings):
        yield from check(reports)
    yield from _nccl(reports, nodes)
    for check in (_memory, _store):
        yield from check(reports)


def _presence(reports: Sequence[Report], nodes: int, ranks_per_node: int) -> Iterator[Check]:
    """Yield a check for ranks without a report or without measurements. Rank r is on node r // ranks_per_node."""
    hosts: Sequence[str] = next((report.hosts for report in reports if report.hosts), ())  # by node
    total = nodes * ranks_per_node
    here = {report.rank for report in reports}
    missing = [rank for rank in range(total) if rank not in here]
    for node in sorted({rank // ranks_per_node for rank in missing}):
        lost = [rank for rank in missing if rank // ranks_per_node == node]
        host = hosts[node] if node < len(hosts) else ""
        whole = len(lost) == ranks_per_node
        where, all_of_node = f"{host}: " if host else "", " (no rank of the node did)" * whole
        detail = f"{where}{rank_names(lost)} did not start{all_of_node}"
        # If no rank started on any node, the cause is not a node, but a module, an image or the time limit.
        faulty = (host,) if host and whole and here else ()
        yield Check("ranks", FAIL, detail, "see the check 'job' below", faulty)
    stuck = [report for report in reports if report.stage != MEASURED]
    for stage in dict.fromkeys(report.stage for report in stuck):
        ranks = [report.rank for report in stuck if report.stage == stage]
        yield Check("ranks", FAIL, f"{rank_names(ranks)} stopped at stage {stage!r}", "see the check 'job' below")
    if not missing and not stuck:
        yield Check("ranks", OK, f"{total} on {nodes} node{'s' * (nodes != 1)} connected and finished all measurements")


def _devices(reports: Sequence[Report]) -> Iterator[Check]:
    """Yield checks for devices that several ranks use, and for ranks that see no GPU although variables list some."""
    found: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        identity = report.device.get("uuid") or report.device.get("pci", "")
        if identity:
            found.setdefault((report.host, identity), []).append(report.rank)
    double = {key: ranks for key, ranks in found.items() if len(ranks) > 1}
    for (host, identity), ranks in double.items():
        advice = "remove launch.gpu_bind or the job's CUDA_VISIBLE_DEVICES, so that hpcinit assigns the GPUs"
        yield Check("devices", FAIL, f"{host}: {rank_names(ranks)} use the same device, {identity}", advice)
    unseen = [report for report in reports if report.visible and report.device.get("device") == "cpu"]
    if unseen:
        versions = Counter(report.versions.get("torch", "?") for report in unseen)
        which, variable = rank_names([report.rank for report in unseen]), unseen[0].visible[0].partition("=")[0]
        detail = f"torch {versions.most_common(1)[0][0]} finds no GPU on {which}, although {variable} lists some"
        advice = "install a torch build for these GPUs, and check their driver; or request no GPUs"
        yield Check("devices", WARNING, detail, advice)
    if not double and not unseen:
        kinds = Counter(report.device.get("name", report.device.get("device", "?")) for report in reports)
        yield Check("devices", OK, ", ".join(f"{amount} x {name}" for name, amount in kinds.most_common()))


# Values that should be the same on every node.
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
    """Yield a check for each property in which some nodes differ from most nodes."""
    different = False
    for what, value in SAME.items():
        found = [(report.host, value(report)) for report in reports]
        found = [(host, one) for host, one in found if one]
        if len({one for _, one in found}) < 2:
            continue
        different = True
        [(usual, _)] = Counter(one for _, one in found).most_common(1)
        others: dict[str, list[str]] = {}
        for host, one in dict.fromkeys(found):
            if one != usual:
                others.setdefault(one, []).append(host)
        detail = "; ".join(f"{', '.join(dict.fromkeys(hosts))}: {other}" for other, hosts in others.items())
        advice = "request nodes of one kind with partition=... or a constraint"
        yield Check(what, WARNING, f"{detail}; most have {usual}", advice)
    if not different:
        yield Check("same everywhere", OK, f"{', '.join(list(SAME)[:-1])} and {list(SAME)[-1]}")


def _names(reports: Sequence[Report]) -> Iterator[Check]:
    """Yield checks for names that a node can't resolve, and for addresses that resolve to a different node's name."""
    lookers = [report for report in reports if report.node and report.node.names]
    healthy = True
    several = len({report.host for report in reports}) > 1
    for report in lookers:
        assert report.node
        hosts = {name.host for name in report.node.names}
        failed = [name for name in report.node.names if name.error]
        if failed:
            healthy = False
            detail = f"{report.host} cannot resolve {', '.join(name.host for name in failed)}: {failed[0].error}"
            advice = (
                "ask the site to add these names to DNS or to that node's /etc/hosts, or set cluster.host_template=..."
            )
            yield Check("names", FAIL, detail, advice)
        own = next((name for name in report.node.names if name.host == report.host), None)
        if several and own and own.addresses and all(_loopback(address) for address in own.addresses):
            healthy = False
            detail = f"{report.host} resolves its own name to {', '.join(own.addresses)}"
            advice = (
                "ask the site to remove the name from the loopback line of that node's /etc/hosts: "
                "other nodes cannot connect to a loopback address"
            )
            yield Check("names", WARNING, detail, advice)
        for name in report.node.names:
            short = name.back.partition(".")[0]
            if short in hosts and short != name.host.partition(".")[0] and not _loopback(name.addresses[0]):
                healthy = False
                detail = f"{report.host} resolves {name.host} to {name.addresses[0]}, and that address to {name.back}"
                advice = "two nodes have the same address, or the reverse DNS zone is wrong: report it to the site"
                yield Check("names", WARNING, detail, advice)
    if lookers and healthy:
        yield Check("names", OK, f"each of {len(lookers)} nodes resolves the names of the others")


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interfaces(reports: Sequence[Report]) -> Iterator[Check]:
    """Yield checks for network interfaces that are down on one node but up on most others."""
    reported = {report.host: report.node.interfaces for report in reports if report.node}
    common = Counter(one.name for found in reported.values() for one in found if one.up)
    usual = {name for name, amount in common.items() if amount > len(reported) / 2}
    healthy = True
    for host, found in reported.items():
        if lost := sorted(usual - {one.name for one in found if one.up}):
            healthy = False
            advice = f"check the adapter and its cable: `ip link` or `ibstat` on {host}"
            yield Check("interfaces", WARNING, f"{host}: {', '.join(lost)} is down, but up on most nodes", advice)
        if down := [one.name for one in found if one.infiniband and not one.up and one.name not in usual]:
            healthy = False
            detail = f"{host}: InfiniBand port {', '.join(down)} is not active"
            yield Check("interfaces", WARNING, detail, f"check it with `ibstat` on {host}")
    if reported and healthy:
        some = next(iter(reported.values()))
        names = [f"{one.name}{f' {one.gbit:g} Gbit/s' if one.gbit else ''}" for one in some if one.up]
        yield Check("interfaces", OK, f"{', '.join(names) or 'none'}, up on each node")


def _memory(reports: Sequence[Report]) -> Iterator[Check]:
    nodes = {one.host: one.node for one in reports if one.node and one.node.memory_gb}
    little = {host: node for host, node in nodes.items() if node.available_gb < LITTLE_MEMORY * node.memory_gb}
    for host, node in little.items():
        detail = (
            f"{host}: only {node.available_gb:.1f} GB of {node.memory_gb:.0f} GB is available before the program starts"
        )
        yield Check("memory", WARNING, detail, "another job shares the node, or processes of an earlier job remain")
    if nodes and not little:
        least = min(node.available_gb for node in nodes.values())
        yield Check("memory", OK, f"at least {least:.0f} GB available on each node")


def _store(reports: Sequence[Report]) -> Iterator[Check]:
    times = {report.rank: report.store_s for report in reports if report.store_s}
    late = [rank for rank, seconds in times.items() if seconds > SLOW_STORE_S]
    if late:
        detail = f"rank 0's store is slow: it answers {rank_names(late)} in {max(times.values()):.2f} s"
        yield Check("store", WARNING, detail, "rank 0's node is busy, or the network to it is slow")
    elif times:
        yield Check("store", OK, f"rank 0's store answers each rank within {max(times.values()) * 1e6:.0f} us")
