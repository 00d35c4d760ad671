"""Find the slow node, link or device, and the wrong clock, by the reports of the doctor's ranks.

A collective is as slow as its slowest member and names nobody. So nodes are judged by the best of their ways to
others: a node with no good way is slow itself; a way that is slow between two that have good ones is slow by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hpcinit.doctor import check_results
from hpcinit.doctor.check_results import FAIL, OK, WARNING, Check
from hpcinit.records.rank_report import AllReduce, Interface, Link, Report, Rule, slow_links

# What GPUs' links can do, in 10^9 bytes a second and one direction: half of what data sheets give for both.

# The first that is found in torch's name of the device. PCIe cards of the same name have other links: not in the table.
LINKS = (
    # NVLink 5, 1.8 TB/s: https://www.nvidia.com/en-us/data-center/nvlink/
    (re.compile(r"\bG?B[23]00\b"), 900.0),
    # NVLink 4, 900 GB/s: https://www.nvidia.com/en-us/data-center/h100/ and .../h200/
    (re.compile(r"\b(H100 80GB HBM3|H100 64GB|H200|GH200|H800)(?!.*(PCIe|NVL))"), 450.0),
    # NVLink 3, 600 GB/s: https://www.nvidia.com/en-us/data-center/a100/
    (re.compile(r"\bA100-SXM"), 300.0),
    # NVLink 2, 300 GB/s: https://www.nvidia.com/en-us/data-center/v100/
    (re.compile(r"\bV100-SXM"), 150.0),
)
# Of the peak, an assumption: below half something is wrong (a link that is down, the wrong interface, no GPUDirect),
# above it is nobody's fault. What is compared: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
HEALTHY = 0.5


def link_gb_s(device: str) -> float | None:
    """Of a GPU with others of its node; None where it is not known."""
    return next((speed for pattern, speed in LINKS if pattern.search(device)), None)


def network_gb_s(interfaces: Sequence[Interface]) -> float | None:
    """Of a node: its InfiniBand ports that are up, else its other interfaces, as their drivers tell. None: not told."""
    ports = [one for one in interfaces if one.up and one.gbit]
    chosen = [one for one in ports if one.infiniband] or ports
    return sum(one.gbit for one in chosen) / 8 or None


# gloo and the kernel's scheduler share the cores with the ranks themselves: what is no multiple is noise.
RULES = {True: (Rule(3.0, least=5e-3), Rule(4.0)), False: (Rule(1.5, least=50e-6), Rule(1.5))}  # by: on CPUs?
# Of two nodes nobody can tell which is slow, nor that they are, but for this: within a room a round trip takes
# microseconds (InfiniBand) to a tenth of a millisecond (Ethernet).
FAR_S = 5e-3
DEVICE = Rule(1.3)


def check_links(reports: Sequence[Report]) -> Iterator[Check]:
    measured = [link for report in reports for link in report.links]
    if not measured:
        return
    host = {report.rank: report.host for report in reports}
    on_cpu = any(report.backend == "gloo" for report in reports)
    yield from _between([link for link in measured if link.between_nodes], host, on_cpu)
    yield from _inside([link for link in measured if not link.between_nodes], host, on_cpu)
    yield from _matmul(reports)
    yield from _clocks([link for link in measured if link.between_nodes], host)
    yield from _all_reduce(reports, on_cpu)


Times = Mapping[Link, Sequence[float]]


def _times(links: Sequence[Link]) -> tuple[Times, Times]:
    """The larger the slower: round trips, and seconds for a GB."""
    return {one: one.round_trip_s for one in links}, {one: tuple(1 / max(g, 1e-9) for g in one.gb_s) for one in links}


def _between(links: Sequence[Link], host: Mapping[int, str], on_cpu: bool) -> Iterator[Check]:
    if not links:
        return
    well, bad = True, set[str]()
    for times, rule, unit in zip(_times(links), RULES[on_cpu], ("round trip", "bandwidth"), strict=True):
        ends: dict[str, list[Sequence[float]]] = {}
        for link in links:
            for rank in (link.a, link.b):
                ends.setdefault(host.get(rank, "?"), []).append(times[link])
        best = {name: [min(values) for values in zip(*rounds, strict=True)] for name, rounds in ends.items()}
        for name in slow_links(best, rule):
            well = False
            bad.add(name)
            usual = sorted(min(values) for other, values in best.items() if other != name)
            said = f"{name}: even its best way to another node is slow, {unit} {_said(min(best[name]), unit)}, "
            said += f"of the others {_said(usual[len(usual) // 2], unit)}"
            yield Check("network", FAIL, said, f"--remember leaves {name} out of what is submitted", (name,))
        for link in slow_links(times, rule):
            if not bad & {host.get(link.a, "?"), host.get(link.b, "?")}:
                well = False
                said = f"{_way(link, host)} is slow, {unit} {_said(min(times[link]), unit)}, and both have better ways"
                yield Check("network", WARNING, said, "a cable or a switch between them: tell the site")
    far = [link for link in links if min(link.round_trip_s) > FAR_S and not bad & {host.get(link.a), host.get(link.b)}]
    if far and len(set(host.values())) == 2:
        well, link = False, max(far, key=_best_trip)
        said = f"{_way(link, host)}: a round trip takes {_said(min(link.round_trip_s), 'round trip')}"
        yield Check("network", FAIL, said, "which of the two is slow, nodes=3 tells")
    if well:
        trips = sorted(min(link.round_trip_s) for link in links)
        speed = sorted(max(link.gb_s) for link in links)
        said = f"{len(links)} ways between nodes, round trip {_said(trips[0], 'round trip')} to "
        said += f"{_said(trips[-1], 'round trip')}, {speed[0]:.2f} to {speed[-1]:.2f} GB/s"
        yield Check("network", OK, said)


def _inside(links: Sequence[Link], host: Mapping[int, str], on_cpu: bool) -> Iterator[Check]:
    if not links:
        return
    well = True
    for times, rule, unit in zip(_times(links), RULES[on_cpu], ("round trip", "bandwidth"), strict=True):
        for link in slow_links(times, rule):
            well = False
            name = host.get(link.a, "?")
            said = f"{name}: ranks {link.a} and {link.b} have a slow way, {unit} {_said(min(times[link]), unit)}"
            blamed = () if on_cpu else (name,)  # on CPUs it is what else runs there
            do = "its NVLink or PCIe: nvidia-smi topo -m, nvidia-smi nvlink --status; --remember leaves it out"
            yield Check("inside nodes", WARNING if on_cpu else FAIL, said, do if blamed else "what else runs?", blamed)
    if well:
        speed = sorted(max(link.gb_s) for link in links)
        said = f"{len(links)} ways inside nodes, {speed[0]:.2f} to {speed[-1]:.2f} GB/s"
        yield Check("inside nodes", OK, said)


def _matmul(reports: Sequence[Report]) -> Iterator[Check]:
    times = {report.rank: report.matmul_s for report in reports if report.matmul_s}
    host = {report.rank: report.host for report in reports}
    late = slow_links(times, DEVICE)
    for rank in late:
        said = f"{host[rank]}: the device of rank {rank} computes in {min(times[rank]) * 1e3:.1f} ms what others do in "
        said += f"{min(min(values) for values in times.values()) * 1e3:.1f} ms"
        do = "hot or capped: nvidia-smi -q -d PERFORMANCE,TEMPERATURE; --remember leaves it out"
        yield Check("devices' speed", FAIL, said, do, (host[rank],))
    if times and not late:
        yield Check("devices' speed", OK, f"within {DEVICE.factor:g} times of each other")


def _clocks(links: Sequence[Link], host: Mapping[int, str]) -> Iterator[Check]:
    """From node to node, beginning with rank 0's."""
    ahead, within = {host.get(0, "?"): 0.0}, {host.get(0, "?"): 0.0}
    size = 0
    while len(ahead) > size:
        size, reached = len(ahead), set(ahead)
        for link in links:
            a, b = host.get(link.a, "?"), host.get(link.b, "?")
            for known, other, sign in ((a, b, 1), (b, a, -1)):
                if known in reached and other not in ahead:
                    ahead[other] = ahead[known] + sign * link.ahead_s
                    within[other] = within[known] + link.within_s
    if len(ahead) < 2:
        return
    wrong = False
    for name, seconds in ahead.items():
        found = check_results.ClockSkew(max(0.0, abs(seconds) - within[name]) * (1 if seconds > 0 else -1))
        if found.grade != OK:
            wrong = True
            yield Check("clocks", found.grade, f"{name} is {found}, against rank 0's node", "have chronyd look at it")
    if not wrong:
        most = max(abs(seconds) for seconds in ahead.values())
        yield Check("clocks", OK, f"within {max(most, *within.values()) * 1e3:.1f} ms of rank 0's node")


def _all_reduce(reports: Sequence[Report], on_cpu: bool) -> Iterator[Check]:
    """Against what the hardware should give, where that is known; gloo goes through the CPUs and says nothing of it."""
    own = {report.host: (report.on_node.seconds,) for report in reports if report.on_node}
    for name in () if on_cpu else slow_links(own, RULES[False][1]):
        said = f"{name}: an all-reduce inside takes {own[name][0] * 1e3:.2f} ms, the best node's "
        said += f"{min(own.values())[0] * 1e3:.2f} ms"
        yield Check("all-reduce inside nodes", FAIL, said, "nvidia-smi topo -m on both", (name,))
    largest = max((one for report in reports for one in report.all_reduce), key=_size, default=None)
    if largest is None or largest.ranks < 2:
        return
    said = f"{largest.size / 2**20:g} MiB over {largest.ranks} ranks at {largest.bus_gb_s:.2f} GB/s bus bandwidth"
    expected, of_what = (None, "") if on_cpu else _expected(reports)
    if expected is None:
        yield Check("all-reduce", OK, said + (", through the CPUs" if on_cpu else "; what to expect is not known"))
    elif largest.bus_gb_s < HEALTHY * expected:
        do = "NCCL_DEBUG=INFO says which transport it took: Socket in the place of IB, no GPUDirect, fewer adapters?"
        yield Check("all-reduce", WARNING, f"{said}, less than half of {expected:g} GB/s, {of_what}", do)
    else:
        yield Check("all-reduce", OK, f"{said}, of {expected:g} GB/s at most, {of_what}")


def _size(one: AllReduce) -> int:
    return one.size


def _expected(reports: Sequence[Report]) -> tuple[float | None, str]:
    """GB/s of the narrowest part, and which it is."""
    device = next((report.device.get("name", "") for report in reports if report.device), "")
    ways = []
    if (link := link_gb_s(device)) is not None and any(report.local_world_size > 1 for report in reports):
        ways.append((link, f"{device}'s link"))
    networks = [network_gb_s(report.node.interfaces) for report in reports if report.node]
    told = [speed for speed in networks if speed]
    if len({report.host for report in reports}) > 1:
        if not told:
            return None, ""
        ways.append((min(told), "a node's adapters as their drivers tell"))
    return min(ways) if ways else (None, "")


def _said(seconds: float, unit: str) -> str:
    if unit == "bandwidth":
        return f"{1 / seconds:.3g} GB/s"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _best_trip(link: Link) -> float:
    return min(link.round_trip_s)


def _way(link: Link, host: Mapping[int, str]) -> str:
    return f"{host.get(link.a, '?')} - {host.get(link.b, '?')} (ranks {link.a} and {link.b})"
