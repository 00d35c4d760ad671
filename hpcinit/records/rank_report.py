"""The report of a rank of the doctor's job: doctor/rank-N.json, with the links that it measured.

The rank writes the report again at each stage. If it hangs or its node fails, the earlier stages remain.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
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
    """A link between two ranks, measured by the first. It has one value per round: the best of several tries.

    round_trip_s: time for 8 bytes. gb_s: 10^9 bytes per second in one direction. ahead_s: how far the second rank's
    clock is ahead, with an error of at most within_s; measured only between nodes.
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
    """A measured all-reduce.

    size: bytes. seconds: the time of the slowest rank, best of several tries. ranks: how many took part.
    """

    size: int
    seconds: float
    ranks: int

    @property
    def bus_gb_s(self) -> float:
        """Return 2 (n - 1) / n x size / time, which is comparable with a link's bandwidth for any number of ranks.

        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        return 2 * (self.ranks - 1) / self.ranks * self.size / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Copies:
    """Bandwidth of copies in 10^9 bytes per second: from pinned host memory, to it, and on the device (one way)."""

    to_device_gb_s: float
    from_device_gb_s: float
    on_device_gb_s: float


@dataclass(frozen=True)
class Report:
    """What one rank of the doctor found.

    device: torch's name for it, with name, uuid and pci where known. cpus: cores on which it may run. driver: the
    GPU's. pid: the rank's process. copies: only for a GPU. Only local rank 0 reports node, hosts (those of the world)
    and on_node (the all-reduce within the node).
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
    """Return the reports in `folder`, sorted by rank. Skip files that cannot be read."""
    return sorted(_reports(folder / FOLDER), key=lambda one: one.rank)


def _reports(place: Path) -> Iterator[Report]:
    for path in place.glob("rank-*.json"):
        if report := run_folder.read_record(Report, path):
            yield report


# Which links are measured, in which order, and which of them are slow.
#
# inside    rank i and i + 1 of a node, around it                       NVLink, PCIe, shared memory
# between   local rank r of a node and the same of the next, around     the network, with every adapter that ranks use

K = TypeVar("K", bound=Hashable)


class Pair(NamedTuple):
    a: int
    b: int
    between_nodes: bool


def links_of_phase(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """Return the links to measure, each once, starting with those inside nodes. nodes: the ranks of each node."""
    found = [Pair(a, b, False) for ranks in nodes for a, b in _ring(ranks)]
    for here, there in _ring(range(len(nodes))):
        found += [Pair(a, b, True) for a, b in zip(nodes[here], nodes[there], strict=False)]
    return found


def _ring(items: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of neighbors in a ring. Two items have one link, one item has none."""
    if len(items) < 2:
        return []
    around = [(items[i], items[(i + 1) % len(items)]) for i in range(len(items))]
    return around if len(items) > 2 else around[:1]


def measurement_phases(wanted: Sequence[Pair]) -> list[list[Pair]]:
    """Return phases in which each rank measures one link.

    A phase has only links inside nodes, or only between nodes.
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
    """The definition of slow: in every round, a time more than `factor` times the median of all, more than `mads`
    median absolute deviations above it, and more than `least` above it.

    One round is not enough, because another job may use the network for a moment.
    """

    factor: float
    mads: float = 3.0
    least: float = 0.0


def slow_links(times: Mapping[K, Sequence[float]], rule: Rule) -> list[K]:
    """Return the slow keys, or none if there are fewer than three keys.

    times: key -> its times in each round; larger is slower.
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
