"""Finds slow nodes, links and devices, and wrong clocks, in the reports of the doctor's ranks.

A collective is as slow as its slowest member, but does not show which member that is. So each node is judged by its
best link to another node: a node without a fast link is slow. If two nodes have fast links to other nodes but the link
between them is slow, that link is faulty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpcinit.base.text import counted
from hpcinit.doctor import clock_skew
from hpcinit.records.check_results import FAIL, OK, WARNING, Check
from hpcinit.records.rank_report import Link, Report, Rule, slow_links

# gloo shares the cores with the ranks and other processes, so smaller differences are noise.
RULES = {True: (Rule(3.0, least=5e-3), Rule(4.0)), False: (Rule(1.5, least=50e-6), Rule(1.5))}  # key: CPUs are used
# With two nodes, there are no others to compare. But in a data center, a round trip takes microseconds (InfiniBand) to
# a tenth of a millisecond (Ethernet).
FAR_S = 5e-3
DEVICE = Rule(1.3)


def check_links(reports: Sequence[Report]) -> Iterator[Check]:
    """Yield checks of the links between ranks, the device speeds, the clocks and the all-reduce.

    reports: the reports of the doctor's ranks.
    """
    measured = [link for report in reports for link in report.links]
    if not measured:
        return
    host = {report.rank: report.host for report in reports}
    on_cpu = any(report.backend == "gloo" for report in reports)
    yield from _links_between_nodes([link for link in measured if link.between_nodes], host, on_cpu)
    yield from _links_inside_nodes([link for link in measured if not link.between_nodes], host, on_cpu)
    yield from _device_speeds(reports)
    yield from _clocks([link for link in measured if link.between_nodes], host)
    yield from _all_reduce(reports, on_cpu)


Times = Mapping[Link, Sequence[float]]


def _seconds_by_link(links: Sequence[Link]) -> tuple[Times, Times]:
    """Return the round trips and the seconds per GB of each link. In both, larger is slower."""
    return {one: one.round_trip_s for one in links}, {one: tuple(1 / max(g, 1e-9) for g in one.gb_s) for one in links}


def _links_between_nodes(links: Sequence[Link], host: Mapping[int, str], on_cpu: bool) -> Iterator[Check]:
    """Yield a check for each slow node, and for each slow link between two healthy nodes.

    host: the host of each rank.
    """
    if not links:
        return
    healthy, slow = True, set[str]()
    for times, rule, unit in zip(_seconds_by_link(links), RULES[on_cpu], ("round trip", "bandwidth"), strict=True):
        ends: dict[str, list[Sequence[float]]] = {}
        for link in links:
            for rank in (link.a, link.b):
                ends.setdefault(host.get(rank, "?"), []).append(times[link])
        best = {name: [min(values) for values in zip(*rounds, strict=True)] for name, rounds in ends.items()}
        for name in slow_links(best, rule):
            healthy = False
            slow.add(name)
            usual = sorted(min(values) for other, values in best.items() if other != name)
            detail = f"{name}: its best link to another node is slow: {unit} {_formatted(min(best[name]), unit)}, "
            detail += f"expected about {_formatted(usual[len(usual) // 2], unit)} as on the other nodes"
            yield Check("network", FAIL, detail, f"exclude {name} from submissions with --remember", (name,))
        for link in slow_links(times, rule):
            if not slow & {host.get(link.a, "?"), host.get(link.b, "?")}:
                healthy = False
                detail = f"the link {_ends(link, host)} is slow: {unit} {_formatted(min(times[link]), unit)}; "
                detail += "both nodes have faster links"
                yield Check("network", WARNING, detail, "report the cable or switch between them to the site")
    far = [link for link in links if min(link.round_trip_s) > FAR_S and not slow & {host.get(link.a), host.get(link.b)}]
    if far and len(set(host.values())) == 2:
        healthy, link = False, max(far, key=lambda link: min(link.round_trip_s))
        detail = (
            f"the link {_ends(link, host)} is slow: round trip {_formatted(min(link.round_trip_s), 'round trip')}, "
        )
        detail += f"expected less than {_formatted(FAR_S, 'round trip')}"
        yield Check("network", FAIL, detail, "repeat with nodes=3 to find which of the two nodes is slow")
    if healthy:
        trips = sorted(min(link.round_trip_s) for link in links)
        speed = sorted(max(link.gb_s) for link in links)
        detail = f"{counted(len(links), 'link')} between nodes, round trip {_formatted(trips[0], 'round trip')} to "
        detail += f"{_formatted(trips[-1], 'round trip')}, {speed[0]:.2f} to {speed[-1]:.2f} GB/s"
        yield Check("network", OK, detail)


def _links_inside_nodes(links: Sequence[Link], host: Mapping[int, str], on_cpu: bool) -> Iterator[Check]:
    """Yield a check for each slow link between two ranks on the same node."""
    if not links:
        return
    healthy = True
    for times, rule, unit in zip(_seconds_by_link(links), RULES[on_cpu], ("round trip", "bandwidth"), strict=True):
        for link in slow_links(times, rule):
            healthy = False
            name = host.get(link.a, "?")
            detail = f"{name}: the link between ranks {link.a} and {link.b} is slow: "
            detail += f"{unit} {_formatted(min(times[link]), unit)}"
            if on_cpu:  # the cause is probably another process on the cores
                yield Check("inside nodes", WARNING, detail, f"see which other processes run on {name}: top")
                continue
            advice = (
                "check its NVLink or PCIe: nvidia-smi topo -m, nvidia-smi nvlink --status; or exclude it: --remember"
            )
            yield Check("inside nodes", FAIL, detail, advice, (name,))
    if healthy:
        speed = sorted(max(link.gb_s) for link in links)
        detail = f"{counted(len(links), 'link')} inside nodes, {speed[0]:.2f} to {speed[-1]:.2f} GB/s"
        yield Check("inside nodes", OK, detail)


def _device_speeds(reports: Sequence[Report]) -> Iterator[Check]:
    """Yield a check for each device on which a matrix product is slower than on the fastest device."""
    times = {report.rank: report.matmul_s for report in reports if report.matmul_s}
    host = {report.rank: report.host for report in reports}
    late = slow_links(times, DEVICE)
    for rank in late:
        detail = (
            f"{host[rank]}: the device of rank {rank} is slow: a matrix product takes {min(times[rank]) * 1e3:.1f} ms, "
        )
        detail += f"but {min(min(values) for values in times.values()) * 1e3:.1f} ms on the fastest device"
        advice = (
            "check the temperature and the power limit: nvidia-smi -q -d PERFORMANCE,TEMPERATURE; "
            "or exclude the node: --remember"
        )
        yield Check("devices' speed", FAIL, detail, advice, (host[rank],))
    if times and not late:
        yield Check("devices' speed", OK, f"no device takes more than {DEVICE.factor:g} times as long as the fastest")


def _clocks(links: Sequence[Link], host: Mapping[int, str]) -> Iterator[Check]:
    """Yield a check for each node whose clock differs from the clock of rank 0's node.

    Each link shows the difference between two clocks. The differences are added up along the links from rank 0's node.
    """
    ahead, within = {host.get(0, "?"): 0.0}, {host.get(0, "?"): 0.0}
    size = 0
    while len(ahead) > size:
        size, reached = len(ahead), set(ahead)
        for link in links:
            a, b = host.get(link.a, "?"), host.get(link.b, "?")
            for near, other, sign in ((a, b, 1), (b, a, -1)):
                if near in reached and other not in ahead:
                    ahead[other] = ahead[near] + sign * link.ahead_s
                    within[other] = within[near] + link.within_s
    if len(ahead) < 2:
        return
    wrong = False
    for name, seconds in ahead.items():
        found = clock_skew.ClockSkew(max(0.0, abs(seconds) - within[name]) * (1 if seconds > 0 else -1))
        if found.status != OK:
            wrong = True
            detail = f"{name}: the clock is {found}, compared with rank 0's node"
            yield Check("clocks", found.status, detail, "ask the site to synchronize the clocks (chronyd)")
    if not wrong:
        most = max(abs(seconds) for seconds in ahead.values())
        yield Check("clocks", OK, f"within {max(most, *within.values()) * 1e3:.1f} ms of rank 0's node")


def _all_reduce(reports: Sequence[Report], on_cpu: bool) -> Iterator[Check]:
    """Yield a check for each node with a slow all-reduce, and a check with the bandwidth of the largest all-reduce."""
    own = {report.host: (report.on_node.seconds,) for report in reports if report.on_node}
    for name in () if on_cpu else slow_links(own, RULES[False][1]):
        detail = f"{name}: an all-reduce on the node is slow: {own[name][0] * 1e3:.2f} ms, "
        detail += f"but {min(own.values())[0] * 1e3:.2f} ms on the fastest node"
        yield Check(
            "all-reduce inside nodes", FAIL, detail, "compare it with the fastest node: nvidia-smi topo -m", (name,)
        )
    largest = max((one for report in reports for one in report.all_reduce), key=lambda one: one.size, default=None)
    if largest is None or largest.ranks < 2:
        return
    detail = f"{largest.size / 2**20:g} MiB over {largest.ranks} ranks at {largest.bus_gb_s:.2f} GB/s bus bandwidth"
    yield Check("all-reduce", OK, detail + ", on the CPUs" * on_cpu)


def _formatted(seconds: float, unit: str) -> str:
    """Return a time such as '12 us' or '3.4 ms'. For the unit 'bandwidth', convert seconds per GB to GB/s."""
    if unit == "bandwidth":
        return f"{1 / seconds:.3g} GB/s"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _ends(link: Link, host: Mapping[int, str]) -> str:
    return f"{host.get(link.a, '?')} - {host.get(link.b, '?')} (ranks {link.a} and {link.b})"
