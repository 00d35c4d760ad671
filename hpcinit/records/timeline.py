"""The start-up events of every rank, in timeline/JOB/HOST.jsonl in the run folder. JOB is one attempt (World.job).

Each node has one file, because several nodes that append to the same file over NFS would overwrite each other's lines.
A rank appends each event at once, as one line, so its events are on disk even if it hangs or is killed. Times are
seconds since 1970 by the node's clock. report/startup_phases.py corrects them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcinit.base import background_writer, safe_files
from hpcinit.base.errors import HpcinitError
from hpcinit.records import run_folder, scratch, training_spans
from hpcinit.records.training_spans import Span
from hpcinit.slurm import nodelist

# In the order of time. Events may be missing: only ranks of a torchrun agent have 'spawned', only ranks of a fork
# server have 'forked', and only ranks that hpcinit.run started have 'met'. A rank that hangs or dies lacks all later
# events.
EVENTS = {
    "submitted": "sbatch accepted the job",
    "allocated": "the job got its nodes, or, in a restart inside the job, the previous ranks had exited",
    "started": "the rank's process started (with launch=fork: its fork server; with launch=torchrun: its agent)",
    "spawned": "the rendezvous of the agents was complete, and the agent started the rank's process",
    "interpreter": "Python ran the first line of hpcinit",
    "forked": "the fork server finished its imports and forked the rank",
    "met": "the rank found rank 0",
    "imported": "the program imported torch and called hpcinit.init",
    "device": "the device was chosen and bound",
    "store": "all ranks were in init, and torch's store answered",
    "joined": "torch's process group was created",
    "collective": "the first collective (a barrier) was complete",
    "up": "hpcinit.init returned",
}
# Environment variable of the batch script: when the job got its nodes, in seconds since 1970.
ENV_ALLOCATED = "HPCINIT_ALLOCATED"
# Environment variable of a rank that an agent starts: when the agent started, seconds since 1970; '' for a restart.
ENV_AGENT_BEGAN = "HPCINIT_AGENT_BEGAN"
LAST = next(reversed(EVENTS))
# Not a start-up event: the program ended with status 0. `hpcinit why` uses it if other ranks failed.
RETURNED = "returned"


@dataclass(frozen=True)
class Rank:
    """The start-up of one rank.

    events: for each event in EVENTS that occurred, its time in seconds since 1970.
    pid, local_rank: the process id and the rank's number on its node.
    clock: (offset, error): how many seconds rank 0's clock is ahead of this node's, and the maximum error, as the
        rendezvous measured them. None if not measured.
    returned: when the program ended with status 0, or None if it did not.
    """

    rank: int
    host: str
    local_rank: int = 0
    pid: int = 0
    events: Mapping[str, float] = field(default_factory=dict)
    clock: tuple[float, float] | None = None
    returned: float | None = None

    def between(self, first: str, second: str) -> float | None:
        """Return the seconds between two events, or None if the rank did not record both."""
        if first in self.events and second in self.events:
            return self.events[second] - self.events[first]
        return None

    @property
    def furthest(self) -> str:
        """Return the last event that this rank recorded, or '' if it recorded none."""
        return next((name for name in reversed(EVENTS) if name in self.events), "")


@dataclass(frozen=True)
class Attempt:
    """One attempt: one start of all ranks.

    job: World.job, for Slurm 'JOB.STEP.RESTART'.
    ranks: the ranks that recorded an event, sorted by rank.
    nodes, world_size: the number of nodes and ranks that should have started.
    hosts: the hosts of the step in Slurm's order, or () if unknown.
    timeout_s, formula: the start-up timeout in init() on rank 0, and how it was computed. 0 and '' if unknown.
    spans: what rank 0 did after the start-up.
    """

    job: str
    world_size: int
    nodes: int
    ranks: tuple[Rank, ...]
    hosts: tuple[str, ...] = ()
    launcher: str = ""
    timeout_s: float = 0.0
    formula: str = ""
    spans: tuple[Span, ...] = ()

    @property
    def complete(self) -> bool:
        """Return whether all ranks completed their start-up."""
        return len(self.ranks) == self.world_size and all(LAST in rank.events for rank in self.ranks)

    @property
    def absent(self) -> list[int]:
        """Return the ranks that recorded no event."""
        return sorted(set(range(self.world_size)) - {rank.rank for rank in self.ranks})

    @property
    def restart(self) -> int:
        """Return how often Slurm had restarted the job: the last number in `job`. Return 0 for other launchers."""
        last = self.job.rpartition(".")[2]
        return int(last) if last.isdecimal() else 0

    @property
    def waited_s(self) -> float | None:
        """Return the longest time that a rank waited for others at start-up, or None if no rank has finished waiting.

        A rank waits twice: in the rendezvous, and for the process group in init(). The two times are not added, because
        the start-up timeout limits each of them separately.
        """
        found = []
        for rank in self.ranks:
            up = "forked" if "forked" in rank.events else "interpreter"
            found += [rank.between(up, "met"), rank.between("imported", "collective")]
        return max((seconds for seconds in found if seconds is not None), default=None)


def path(run: Path, job: str, host: str) -> Path:
    """Return the path of the file in which one node records its events in one attempt.

    run: the run folder.
    """
    return run / run_folder.TIMELINE / scratch.folder_name(job) / f"{host}.jsonl"


class Writer:
    """Appends start-up events to the file of this node.

    write() never raises, because a start-up must not fail for lack of its record. Events that could not be written are
    kept, and the next write() writes them first.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._left = file, b""
        self._fd: int | None = None

    def write(self, rank: int, values: Mapping[str, Any]) -> None:
        line = (json.dumps({"rank": rank, **values}, separators=(",", ":")) + "\n").encode()
        text, self._left = self._left + line, self._left + line
        with background_writer.suppressed("the start-up timeline"):
            if os.write(self._opened(), text) < len(text):
                self._left = b"\n" + text  # this ends the incomplete line, which a reader skips
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
            self._left = b""

    def _opened(self) -> int:
        if self._fd is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return self._fd

    def close(self) -> None:
        """Close the file. In a forked child, this closes only the child's copy of the descriptor."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):  # over NFS, the lines reach the server only now
                os.close(fd)


def read(run: Path) -> list[Attempt]:
    """Return all attempts of the run in the folder `run`, in the order in which they started.

    Unreadable files are skipped.
    """
    folders = (run / run_folder.TIMELINE).glob("*/")
    found = [attempt for folder in folders if (attempt := read_attempt(folder)) is not None]
    return sorted(found, key=lambda attempt: (begun(attempt) or 0.0, attempt.job))


def begun(attempt: Attempt) -> float | None:
    """Return when the first process of a rank started, in seconds since 1970, or None if unknown."""
    seen = (rank.events.get("started", rank.events.get("interpreter")) for rank in attempt.ranks)
    return min((event for event in seen if event is not None), default=None)


def read_attempt(folder: Path) -> Attempt | None:
    """Return the attempt in the folder timeline/JOB, or None if no line of it can be read."""
    ranks: dict[int, dict[str, Any]] = {}
    hosts = 0
    for file in sorted(folder.glob("*.jsonl")):
        try:
            text = safe_files.read_text(file)
        except OSError:
            continue
        hosts += 1
        for rank, values in _lines(text):
            ranks.setdefault(rank, {"host": file.stem}).update(values)
    try:
        return replace(_attempt(folder.name, ranks, hosts), spans=training_spans.read(folder)) if ranks else None
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
    """Yield (rank, values) of each line. Skip lines from other versions and lines that a full disk has cut short."""
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
        returned=float(values[RETURNED]) if RETURNED in values else None,
        clock=(float(clock[0]), float(clock[1])) if clock else None,
    )
