"""The report of one rank of a `hpcinit doctor` job, including the links that it measured: doctor/rank-N.json.

The rank writes its report after each stage. If it hangs or its node fails, the results of earlier stages remain.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from hpcinit.base import safe_files
from hpcinit.records import run_folder
from hpcinit.records.node_facts import Node

FOLDER = "doctor"
BEGUN, MET, MEASURED = "begun", "met", "measured"  # stages: started, in the process group, done


@dataclass(frozen=True)
class Link:
    """A link between two ranks, as the first rank measured it.

    Each list has one value per round: the best of several tries.

    round_trip_s: how long 8 bytes take to the other rank and back, in seconds.
    gb_s: the bandwidth in one direction, in 10^9 bytes per second.
    ahead_s: how many seconds the second rank's clock is ahead. Measured only between nodes.
    within_s: the maximum error of ahead_s.
    """

    a: int
    b: int
    between_nodes: bool
    round_trip_s: tuple[float, ...]
    gb_s: tuple[float, ...]
    ahead_s: float = 0.0
    within_s: float = 0.0


@dataclass(frozen=True)
class AllReduce:
    """The measurement of an all-reduce.

    size: how many bytes were reduced.
    seconds: the time of the slowest rank, in the best of several tries.
    ranks: how many ranks took part.
    """

    size: int
    seconds: float
    ranks: int

    @property
    def bus_gb_s(self) -> float:
        """Return the bus bandwidth, 2 (n - 1) / n x size / time for n ranks.

        For any number of ranks, it can be compared with the bandwidth of a link:
        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        return 2 * (self.ranks - 1) / self.ranks * self.size / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Copies:
    """How fast a GPU copies data, in 10^9 bytes per second.

    to_device_gb_s: from pinned host memory to the GPU.
    from_device_gb_s: from the GPU to pinned host memory.
    on_device_gb_s: within the GPU's memory, in one direction.
    """

    to_device_gb_s: float
    from_device_gb_s: float
    on_device_gb_s: float


@dataclass(frozen=True)
class Report:
    """What one rank of a doctor job found.

    device: torch's name of the device. name, uuid and pci identify the device further, if torch reports them.
    cpus: the cores on which the rank may run.
    driver: the version of the GPU driver.
    pid: the process id of the rank.
    copies: the copy bandwidths. None without a GPU.
    node, hosts, on_node: the facts about the node, the hosts of all ranks, and the all-reduce within the node. Only
        local rank 0 reports these.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: str
    job: str
    stage: str = BEGUN
    hosts: tuple[str, ...] = ()
    device: Mapping[str, str] = field(default_factory=dict)
    visible: tuple[str, ...] = ()
    driver: str = ""
    numa: str = ""
    cpus: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""
    node: Node | None = None
    store_s: float = 0.0
    matmul_s: tuple[float, ...] = ()
    links: tuple[Link, ...] = ()
    all_reduce: tuple[AllReduce, ...] = ()
    on_node: AllReduce | None = None
    pid: int = 0
    copies: Copies | None = None


def write(folder: Path, report: Report) -> None:
    """Write the report atomically. Raise OSError if the file cannot be written."""
    place = folder / FOLDER
    place.mkdir(mode=0o700, exist_ok=True)
    safe_files.write_atomically(place / f"rank-{report.rank}.json", json.dumps(asdict(report)) + "\n")


def read(folder: Path) -> list[Report]:
    """Return the reports in `folder`, sorted by rank. Unreadable files are skipped."""
    return sorted(run_folder.read_records(Report, folder / FOLDER, "rank-*.json"), key=lambda one: one.rank)


# Below: which links are measured, in which order, and which of them are slow. Each kind of link forms rings:
#
# inside    ranks i and i + 1 of a node                                 NVLink, PCIe, shared memory
# between   local rank r of a node, and local rank r of the next node   the network, with every adapter that ranks use

K = TypeVar("K", bound=Hashable)


class Pair(NamedTuple):
    a: int
    b: int
    between_nodes: bool


def links_of_phase(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """Return the pairs of ranks between which the link is measured. Links inside nodes are first.

    nodes: the ranks of each node.
    """
    found = [Pair(a, b, False) for ranks in nodes for a, b in _ring(ranks)]
    for here, there in _ring(range(len(nodes))):
        found += [Pair(a, b, True) for a, b in zip(nodes[here], nodes[there], strict=False)]
    return found


def _ring(items: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of neighbors in a ring of `items`. For two items, return one pair, and for one item none."""
    if len(items) < 2:
        return []
    around = [(items[i], items[(i + 1) % len(items)]) for i in range(len(items))]
    return around if len(items) > 2 else around[:1]


def measurement_phases(wanted: Sequence[Pair]) -> list[list[Pair]]:
    """Divide the links into phases so that each rank measures at most one link at a time.

    A phase contains only links inside nodes, or only links between nodes.
    """
    found: list[tuple[bool, set[int], list[Pair]]] = []
    for pair in wanted:
        for between, busy, members in found:
            if between == pair.between_nodes and not busy & {pair.a, pair.b}:
                busy |= {pair.a, pair.b}
                members.append(pair)
                break
        else:
            found.append((pair.between_nodes, {pair.a, pair.b}, [pair]))
    return [members for _, _, members in found]


class Rule(NamedTuple):
    """Defines when a measured time, for example of a link, is too long.

    A time is too long if it exceeds all three limits, which are relative to the median of all times. A link is slow if
    its time is too long in every round, because another job may disturb a single round.

    factor: the time is more than `factor` times the median.
    mads: the time is more than `mads` median absolute deviations above the median.
    least: the time is more than `least` above the median.
    """

    factor: float
    mads: float = 3.0
    least: float = 0.0


def slow_links(times: Mapping[K, Sequence[float]], rule: Rule) -> list[K]:
    """Return the keys of `times`, such as links, that are slow according to `rule`.

    With fewer than three keys, nothing counts as slow.

    times: for each key, its time in each round. A larger time is slower.
    """
    rounds = min((len(values) for values in times.values()), default=0)
    if len(times) < 3 or not rounds:
        return []
    left = set(times)
    for number in range(rounds):
        values = {key: times[key][number] for key in times}
        median = statistics.median(values.values())
        mad = statistics.median(abs(value - median) for value in values.values())
        limit = max(rule.factor * median, median + rule.mads * mad, median + rule.least)
        left &= {key for key, value in values.items() if value > limit}
    return [key for key in times if key in left]
