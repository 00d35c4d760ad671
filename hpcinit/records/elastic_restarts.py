"""Records restarts inside a job, with launch=torchrun: elastic.jsonl in the run folder, one line per restart.

Before each restart, the error records and hang reports of the failed start are moved to a folder `before-...`. So the
run folder shows only those of the last start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.records import run_folder, scratch

LATEST = 1e11  # seconds since 1970: the year 5138
ASIDE = "before-"  # errors/before-43.0.0/, hang/before-43.0.0/


@dataclass(frozen=True)
class Restart:
    """One restart of all ranks. job: World.job of the start that failed. number: 1 for the first in this step.

    how: 'Killed', 'Exited with exit code 1'. error: one line of the rank's error, or ''. step: the last reported one,
    or -1. time: seconds since 1970. secondary: whether the error is a consequence of another rank's failure.
    """

    job: str
    number: int
    time: float
    rank: int
    host: str
    how: str
    error: str = ""
    step: int = -1
    secondary: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.time < LATEST or any(not -1 <= one < 2**31 for one in (self.number, self.rank, self.step)):
            raise ValueError(f"a time or a number is out of range: {asdict(self)}")

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.how}" + (f" ({self.error})" if self.error else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(line: str) -> Restart:
    """Return the Restart in a line. Raise ValueError, TypeError or AttributeError if there is none."""
    try:
        return run_folder.from_known_fields(Restart, json.loads(line))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def cause(found: Sequence[Restart]) -> Restart:
    """Return the earliest restart that is not secondary. If all are secondary, return the earliest."""
    return min(found, key=lambda one: (one.secondary, one.time))


def round_folder(step: str, number: int) -> str:
    """Return World.job of restart round `number` in the step '43.0.1' (job, step, restart): '43.0e2.1'."""
    head, _, restart = step.rpartition(".")
    return f"{head}e{number}.{restart}" if number else step


def agents_folder(step: str) -> str:
    """Return World.job of the agents' rendezvous in the step '43.0.1': '43.0a.1'."""
    head, _, restart = step.rpartition(".")
    return f"{head}a.{restart}"


def read(folder: Path) -> Iterator[Restart]:
    """Yield the recorded restarts of the run folder. Skip lines that cannot be read."""
    return run_folder.read_lines(Restart, folder / run_folder.ELASTIC)


def furthest(folder: Path) -> int:
    """Return the last step that rank 0 reported, or -1 if it has not reported any."""
    step = safe_files.json_or_empty(folder / run_folder.PROGRESS).get("step")
    return step if isinstance(step, int) else -1


def record(folder: Path, restart: Restart) -> None:
    """Append a restart to the record. Raise OSError if the file cannot be written."""
    with (folder / run_folder.ELASTIC).open("a") as file:
        file.write(restart.to_json() + "\n")


def set_aside(folder: Path, job: str) -> None:
    """Move the error records and hang reports of the start `job` to folders `before-JOB`.

    Raise OSError if a file cannot be moved.
    """
    from hpcinit.records import error_records  # noqa: PLC0415 - `status` of many runs does not need them

    below = folder / run_folder.ERRORS
    aside = below / f"{ASIDE}{scratch.folder_name(job)}"
    for found in error_records.read(below):
        aside.mkdir(exist_ok=True)
        (below / found.record.name).replace(aside / found.record.name)
    hang = folder / run_folder.HANG_REPORTS / scratch.folder_name(job)
    if hang.is_dir():
        hang.replace(hang.with_name(f"{ASIDE}{hang.name}"))
