"""The moments of every rank's start: timeline/JOB/HOST.jsonl in the run folder, JOB naming one attempt (World.job).

One file per node and not per rank, for the file system; and not one for all, since lines that several nodes append to
one file over NFS overwrite each other. A line is one write(2) with O_APPEND, by one rank, and holds what it knows more
than before, so that what a rank has reached is on disk when it hangs or is killed. Times are seconds since 1970 by
the node's own clock; report/startup_phases.py corrects them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcinit.base import background_writer
from hpcinit.base.errors import HpcinitError
from hpcinit.records import run_folder, scratch
from hpcinit.slurm import nodelist

# In the order of time. Any of them may be missing: 'spawned' is for ranks of a torchrun agent, 'forked' for those of a
# parent, 'met' for those that hpcinit.run started, and a rank that hangs or dies has none of those that come after.
EVENTS = {
    "submitted": "sbatch had taken the job",
    "allocated": "the job had its nodes, or its ranks had ended that begin once more",
    "started": "the rank's process began (of a forked rank: its parent's; with launch=torchrun: its agent's)",
    "spawned": "the agents had met, and this one began the rank's process",
    "interpreter": "Python ran the first line of hpcinit",
    "forked": "the parent had imported, and forked the rank",
    "met": "rank 0 was found",
    "imported": "the program had imported torch, and called hpcinit.init",
    "device": "the device was chosen and bound",
    "store": "all ranks were in init, and torch's store had answered",
    "joined": "torch's process group was made",
    "collective": "the first collective, a barrier, was over",
    "up": "hpcinit.init returned",
}
# Environment variable of the batch script: seconds since 1970, when the ranks' nodes were there.
ENV_ALLOCATED = "HPCINIT_ALLOCATED"
# Of a rank that an agent starts: seconds since 1970 when the agent began; '' where it has begun this rank before.
ENV_AGENT_BEGAN = "HPCINIT_AGENT_BEGAN"
LAST = next(reversed(EVENTS))


@dataclass(frozen=True)
class Rank:
    """moments: name of MOMENTS to seconds since 1970. pid: as its node counts. local_rank: on its node.

    clock: (offset, within): rank 0's clock minus this node's, in seconds, and how wrong that may be, as measured when
    they met; None where nobody did.
    """

    rank: int
    host: str
    local_rank: int = 0
    pid: int = 0
    events: Mapping[str, float] = field(default_factory=dict)
    clock: tuple[float, float] | None = None

    def between(self, first: str, second: str) -> float | None:
        """Seconds from one moment to another of this rank; None where it has not both."""
        if first in self.events and second in self.events:
            return self.events[second] - self.events[first]
        return None

    @property
    def furthest(self) -> str:
        """The last moment that this rank has reached, '' if it says none."""
        return next((name for name in reversed(EVENTS) if name in self.events), "")


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks. job: World.job, 'JOB.STEP.RESTART' of Slurm. ranks: those that left a line, by rank.

    nodes, world_size: as it should be. hosts: of the step's nodes in Slurm's order, () where nobody said.
    timeout_s, formula: of init, as rank 0 said; 0 and '' where it did not come so far.
    """

    job: str
    world_size: int
    nodes: int
    ranks: tuple[Rank, ...]
    hosts: tuple[str, ...] = ()
    launcher: str = ""
    timeout_s: float = 0.0
    formula: str = ""

    @property
    def complete(self) -> bool:
        """All ranks have come to the end of the start."""
        return len(self.ranks) == self.world_size and all(LAST in rank.events for rank in self.ranks)

    @property
    def absent(self) -> list[int]:
        """Ranks that have left no line at all."""
        return sorted(set(range(self.world_size)) - {rank.rank for rank in self.ranks})

    @property
    def restart(self) -> int:
        """Slurm's restart count in the job's name, 0 for other launchers' names."""
        last = self.job.rpartition(".")[2]
        return int(last) if last.isdecimal() else 0

    @property
    def waited_s(self) -> float | None:
        """The longest that a rank was under the start-up's timeout, which begins anew where it looks for rank 0
        and in init; None if nobody came to the end of either. Needs no common clock."""
        found = []
        for rank in self.ranks:
            up = "forked" if "forked" in rank.events else "interpreter"
            found += [rank.between(up, "met"), rank.between("imported", "collective")]
        return max((seconds for seconds in found if seconds is not None), default=None)


def path(run: Path, job: str, host: str) -> Path:
    """Of the ranks of one node in one attempt. run: the run folder."""
    return run / run_folder.TIMELINE / scratch.folder_name(job) / f"{host}.jsonl"


class Writer:
    """Appends to the file of this node. Never raises: no start-up fails because its own record cannot be written. What
    could not be written goes before the next line."""

    def __init__(self, file: Path) -> None:
        self._file, self._left = file, b""
        self._fd: int | None = None

    def write(self, rank: int, values: Mapping[str, Any]) -> None:
        line = (json.dumps({"rank": rank, **values}, separators=(",", ":")) + "\n").encode()
        text, self._left = self._left + line, self._left + line
        with background_writer.suppressed("the timeline of the start"):
            if os.write(self._opened(), text) < len(text):
                self._left = b"\n" + text  # the line that was cut short ends here; a reader skips it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
            self._left = b""

    def _opened(self) -> int:
        if self._fd is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return self._fd

    def close(self) -> None:
        """Also in a forked child, whose copy of the descriptor it is."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):  # over NFS this is when the lines reach the server
                os.close(fd)


def read(run: Path) -> list[Attempt]:
    """All attempts of the run in folder `run`, the first to start first. What cannot be read is left out."""
    folders = (run / run_folder.TIMELINE).glob("*/")
    found = [attempt for folder in folders if (attempt := read_attempt(folder)) is not None]
    return sorted(found, key=lambda attempt: (begun(attempt) or 0.0, attempt.job))


def begun(attempt: Attempt) -> float | None:
    """The first moment that any rank saw itself, which submission and allocation are not."""
    seen = (rank.events.get("started", rank.events.get("interpreter")) for rank in attempt.ranks)
    return min((event for event in seen if event is not None), default=None)


def read_attempt(folder: Path) -> Attempt | None:
    """Of one folder timeline/JOB; None if no line in it can be used."""
    ranks: dict[int, dict[str, Any]] = {}
    hosts = 0
    for file in sorted(folder.glob("*.jsonl")):
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue
        hosts += 1
        for rank, values in _lines(text):
            ranks.setdefault(rank, {"host": file.stem}).update(values)
    try:
        return _attempt(folder.name, ranks, hosts) if ranks else None
    except (ValueError, TypeError, IndexError, HpcinitError):
        return None


def _attempt(name: str, ranks: Mapping[int, Mapping[str, Any]], files: int) -> Attempt:
    first, zero = ranks[min(ranks)], ranks.get(0, {})
    hosts = next((values["hosts"] for values in ranks.values() if "hosts" in values), "")
    return Attempt(
        job=str(first.get("job", name)),
        world_size=max(int(first.get("world_size", 0)), max(ranks) + 1),
        nodes=int(first.get("nodes", 0)) or files,
        ranks=tuple(_rank(rank, values) for rank, values in sorted(ranks.items())),
        hosts=tuple(nodelist.expand(hosts) if hosts else ()),
        launcher=str(first.get("launcher", "")),
        timeout_s=float(zero.get("timeout_s", 0.0)),
        formula=str(zero.get("formula", "")),
    )


def _lines(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(rank, values) of each whole line; a line that a full disk has cut short, or another version's, is left out."""
    for line in text.splitlines():
        try:
            values = json.loads(line)
            rank = values.pop("rank")
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
        numbers: Iterable[Any] = (values[name] for name in EVENTS if name in values)
        if isinstance(rank, int) and rank >= 0 and all(isinstance(number, (int, float)) for number in numbers):
            yield rank, values


def _rank(rank: int, values: Mapping[str, Any]) -> Rank:
    clock = values.get("clock")
    return Rank(
        rank=rank,
        host=str(values["host"]),
        local_rank=int(values.get("local_rank", 0)),
        pid=int(values.get("pid", 0)),
        events={name: float(values[name]) for name in EVENTS if name in values},
        clock=(float(clock[0]), float(clock[1])) if clock else None,
    )
