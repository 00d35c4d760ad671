"""Which node, link or device is slow, and which clock is wrong, by the reports of the doctor's ranks.

A collective is as slow as its slowest member and names nobody. So nodes are judged by the best of their ways to
others: a node with no good way is slow itself; a way that is slow between two that have good ones is slow by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpcinit.facts import clocks, hardware
from hpcinit.facts.checkup import BAD, OK, WARNING, Check
from hpcinit.facts.links import Rule, slow
from hpcinit.facts.rank_report import AllReduce, Link, Report

# gloo and the kernel's scheduler share the cores with the ranks themselves: what is no multiple is noise.
RULES = {True: (Rule(3.0, least=5e-3), Rule(4.0)), False: (Rule(1.5, least=50e-6), Rule(1.5))}  # by: on CPUs?
# Of two nodes nobody can tell which is slow, nor that they are, but for this: within a room a round trip takes
# microseconds (InfiniBand) to a tenth of a millisecond (Ethernet).
FAR_S = 5e-3
DEVICE = Rule(1.3)


def of_links(reports: Sequence[Report]) -> Iterator[Check]:
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
        for name in slow(best, rule):
            well = False
            bad.add(name)
            usual = sorted(min(values) for other, values in best.items() if other != name)
            said = f"{name}: even its best way to another node is slow, {unit} {_said(min(best[name]), unit)}, "
            said += f"of the others {_said(usual[len(usual) // 2], unit)}"
            yield Check("network", BAD, said, f"--remember leaves {name} out of what is submitted", (name,))
        for link in slow(times, rule):
            if not bad & {host.get(link.a, "?"), host.get(link.b, "?")}:
                well = False
                said = f"{_way(link, host)} is slow, {unit} {_said(min(times[link]), unit)}, and both have better ways"
                yield Check("network", WARNING, said, "a cable or a switch between them: tell the site")
    far = [link for link in links if min(link.round_trip_s) > FAR_S and not bad & {host.get(link.a), host.get(link.b)}]
    if far and len(set(host.values())) == 2:
        well, link = False, max(far, key=_best_trip)
        said = f"{_way(link, host)}: a round trip takes {_said(min(link.round_trip_s), 'round trip')}"
        yield Check("network", BAD, said, "which of the two is slow, nodes=3 tells")
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
        for link in slow(times, rule):
            well = False
            name = host.get(link.a, "?")
            said = f"{name}: ranks {link.a} and {link.b} have a slow way, {unit} {_said(min(times[link]), unit)}"
            blamed = () if on_cpu else (name,)  # on CPUs it is what else runs there
            do = "its NVLink or PCIe: nvidia-smi topo -m, nvidia-smi nvlink --status; --remember leaves it out"
            yield Check("inside nodes", WARNING if on_cpu else BAD, said, do if blamed else "what else runs?", blamed)
    if well:
        speed = sorted(max(link.gb_s) for link in links)
        said = f"{len(links)} ways inside nodes, {speed[0]:.2f} to {speed[-1]:.2f} GB/s"
        yield Check("inside nodes", OK, said)


def _matmul(reports: Sequence[Report]) -> Iterator[Check]:
    times = {report.rank: report.matmul_s for report in reports if report.matmul_s}
    host = {report.rank: report.host for report in reports}
    late = slow(times, DEVICE)
    for rank in late:
        said = f"{host[rank]}: the device of rank {rank} computes in {min(times[rank]) * 1e3:.1f} ms what others do in "
        said += f"{min(min(values) for values in times.values()) * 1e3:.1f} ms"
        do = "hot or capped: nvidia-smi -q -d PERFORMANCE,TEMPERATURE; --remember leaves it out"
        yield Check("devices' speed", BAD, said, do, (host[rank],))
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
        found = clocks.Skew(max(0.0, abs(seconds) - within[name]) * (1 if seconds > 0 else -1))
        if found.grade != OK:
            wrong = True
            yield Check("clocks", found.grade, f"{name} is {found}, against rank 0's node", "have chronyd look at it")
    if not wrong:
        most = max(abs(seconds) for seconds in ahead.values())
        yield Check("clocks", OK, f"within {max(most, *within.values()) * 1e3:.1f} ms of rank 0's node")


def _all_reduce(reports: Sequence[Report], on_cpu: bool) -> Iterator[Check]:
    """Against what the hardware should give, where that is known; gloo goes through the CPUs and says nothing of it."""
    own = {report.host: (report.on_node.seconds,) for report in reports if report.on_node}
    for name in () if on_cpu else slow(own, RULES[False][1]):
        said = f"{name}: an all-reduce inside takes {own[name][0] * 1e3:.2f} ms, the best node's "
        said += f"{min(own.values())[0] * 1e3:.2f} ms"
        yield Check("all-reduce inside nodes", BAD, said, "nvidia-smi topo -m on both", (name,))
    largest = max((one for report in reports for one in report.all_reduce), key=_size, default=None)
    if largest is None or largest.ranks < 2:
        return
    said = f"{largest.size / 2**20:g} MiB over {largest.ranks} ranks at {largest.bus_gb_s:.2f} GB/s bus bandwidth"
    expected, of_what = (None, "") if on_cpu else _expected(reports)
    if expected is None:
        yield Check("all-reduce", OK, said + (", through the CPUs" if on_cpu else "; what to expect is not known"))
    elif largest.bus_gb_s < hardware.HEALTHY * expected:
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
    if (link := hardware.link_gb_s(device)) is not None and any(report.local_world_size > 1 for report in reports):
        ways.append((link, f"{device}'s link"))
    networks = [hardware.network_gb_s(report.node.interfaces) for report in reports if report.node]
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
