"""torch's flight recorder: which rank has not entered the collective that the others are in.

A dump is a pickle that torch's C++ writes, of dicts, lists, texts and numbers alone. It lies in a folder that others
may be able to write to, and a pickle can name any function to be called: here one that names anything is refused.

Of a dump these are read (torch/csrc/distributed/c10d/FlightRecorder.hpp, and torch/distributed/flight_recorder, which
`torchfrtrace` is): entries[], each with process_group (name, description), collective_seq_id, is_p2p, profiling_name
('nccl:all_reduce'), input_sizes and state ('scheduled', 'started', 'completed').
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcinit.facts import scratch
from hpcinit.facts.ranges import ranges
from hpcinit.facts.safeguards import FLIGHT

MOST_BYTES = 64 << 20  # 2,000 entries with their stacks have some megabytes
MOST_GROUPS = 3  # of which is told
COMPLETED = "completed"


@dataclass(frozen=True)
class Last:
    """The last collective that a rank has entered in a group. number: 1 is the group's first."""

    number: int
    name: str
    sizes: str = ""
    state: str = ""

    def __str__(self) -> str:
        return f"{self.name}{f' of {self.sizes}' * bool(self.sizes)} (number {self.number})"


class _Plain(pickle.Unpickler):
    """Of values that need no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a flight recorder's dump names nothing")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it refers to {pid!r} outside of it")


def load(data: bytes) -> Mapping[str, Any]:
    """A dump. Raises ValueError for what is none, also for a pickle that would call something."""
    try:
        document = _Plain(io.BytesIO(data)).load()
    except Exception as error:  # of broken bytes, pickle raises whatever comes: IndexError, KeyError, MemoryError, ...
        raise ValueError(f"no flight recorder's dump: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise ValueError("no flight recorder's dump: it has no entries")
    return document


def last(dump: Mapping[str, Any]) -> dict[str, Last]:
    """By group, 'default_pg' first among them; sends and receives have numbers of their own and are left out."""
    found: dict[str, Last] = {}
    for entry in dump["entries"]:
        if not isinstance(entry, dict) or entry.get("is_p2p"):
            continue
        number, group = entry.get("collective_seq_id"), _group(entry)
        if isinstance(number, int) and (group not in found or number >= found[group].number):
            found[group] = Last(number, _name(entry), _sizes(entry), str(entry.get("state", "")))
    return found


def _group(entry: Mapping[str, Any]) -> str:
    words = entry.get("process_group")
    return " ".join(map(str, words)) if isinstance(words, list | tuple) else str(words or "")


def _name(entry: Mapping[str, Any]) -> str:
    """'all_reduce' of 'nccl:all_reduce'."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2] or "a collective"


def _sizes(entry: Mapping[str, Any]) -> str:
    """'[1024, 8]' of the first tensor."""
    sizes = entry.get("input_sizes")
    return (
        str(list(sizes[0])) if isinstance(sizes, list | tuple) and sizes and isinstance(sizes[0], list | tuple) else ""
    )


def of_attempt(run: Path, job_id: str, restart: object) -> dict[int, dict[str, Last]]:
    """By rank, of the dumps flight/JOB.STEP.RESTART.rank_N in the run folder; what cannot be read is left out."""
    found: dict[int, dict[str, Last]] = {}
    for path in sorted((run / FLIGHT).glob("*.rank_*")):
        attempt, _, rank = path.name.rpartition(".rank_")
        job, _, rest = attempt.partition(".")
        mine = ("_" in job_id or job == scratch.folder_name(job_id)) and (
            restart is None or rest.rpartition(".")[2] in ("", str(restart))
        )
        try:
            if mine and rank.isdigit() and path.stat().st_size <= MOST_BYTES:
                found[int(rank)] = last(load(path.read_bytes()))
        except (OSError, ValueError):
            continue
    return found


def lines(ranks: Mapping[int, Mapping[str, Last]]) -> tuple[str, ...]:
    """'rank 3 has not entered all_reduce of [8] (number 42), in which ranks 0-2 wait; ...': a line for each group whose
    ranks are not at the same collective."""
    groups = dict.fromkeys(group for lasts in ranks.values() for group in lasts)
    told = [
        line
        for group in groups
        for line in _of_group(group, {r: own[group] for r, own in ranks.items() if group in own})
    ]
    return tuple(told[:MOST_GROUPS])


def _of_group(group: str, ranks: Mapping[int, Last]) -> Iterator[str]:
    furthest = max(one.number for one in ranks.values())
    there = {rank: one for rank, one in ranks.items() if one.number == furthest}
    behind = {rank: one for rank, one in ranks.items() if one.number < furthest}
    where = "" if group.endswith("default_pg") or not group else f" of group {group}"
    kinds = Counter((one.name, one.sizes) for one in there.values())
    if behind:
        verb = "have" if len(behind) > 1 else "has"
        own = "; ".join(dict.fromkeys(f"{one}" for one in behind.values()))
        waits = "waits" if len(there) == 1 else "wait"
        what = f"{next(iter(there.values()))}{where}"
        yield f"{_ranks(behind)} {verb} not entered {what}, in which {_ranks(there)} {waits}; the last entered: {own}"
    elif len(kinds) > 1:  # all are at the same number, and not in the same collective
        at = {kind: [rank for rank, one in there.items() if (one.name, one.sizes) == kind] for kind in kinds}
        parts = [f"{_ranks(found)} in {' '.join(kind)}".strip() for kind, found in at.items()]
        yield f"the ranks are in different collectives at number {furthest}{where}: {', '.join(parts)}"


def _ranks(found: Iterable[int]) -> str:
    numbers = sorted(found)
    return f"rank{'s' * (len(numbers) > 1)} {ranges(numbers)}"
