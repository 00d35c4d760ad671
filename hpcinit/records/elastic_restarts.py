"""Restarts inside a job, with launch=torchrun: elastic.jsonl in the run folder, a line for each.

What the ranks of an earlier start have left (error records, reports of a hang) is set aside before the next one, so
that whoever reads the run folder finds the last start's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.records import error_records, hang_report, run_folder, scratch

LATEST = 1e11  # seconds since 1970: the year 5138
ASIDE = "before-"  # errors/before-43.0.0/, hang/before-43.0.0/


@dataclass(frozen=True)
class Restart:
    """Why all ranks are started again. job: World.job of the start that failed. number: 1 for the first of this step.

    how: 'Killed', 'Exited with exit code 1'. error: one line of the rank's own, or ''. step: the furthest that was
    told, -1 for none. time: seconds since 1970. secondary: whether the error is a consequence of another rank's end.
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

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.how}" + (f" ({self.error})" if self.error else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(line: str) -> Restart:
    """Raises ValueError, TypeError or AttributeError for what is no such line."""
    try:
        found = run_folder.from_known_fields(Restart, json.loads(line))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_types(found)
    return found


def _check_types(found: Restart) -> None:
    """Raise ValueError for a value of another type than its field's: another version or program may have written it."""
    for name in ("job", "host", "how", "error"):
        getattr(found, name).encode()  # UnicodeEncodeError is a ValueError: half a character fits in no file
    for name in ("number", "rank", "step"):
        value = getattr(found, name)
        if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < 2**31:
            raise ValueError(f"{name} is {value!r:.40}, expected a number")
    if not isinstance(found.time, (int, float)) or not 0 <= found.time < LATEST:
        raise ValueError(f"time is {found.time!r:.40}, expected seconds since 1970")
    if not isinstance(found.secondary, bool):
        raise ValueError(f"secondary is {found.secondary!r:.40}, expected true or false")


def cause(found: Sequence[Restart]) -> Restart:
    """The first in time of those that are no consequence of another rank's end; else the first in time."""
    return min(found, key=lambda one: (one.secondary, one.time))


def round_folder(step: str, number: int) -> str:
    """World.job of the ranks' start `number` in the step '43.0.1' (job, step, restart): '43.0e2.1'; 0 is the first."""
    head, _, restart = step.rpartition(".")
    return f"{head}e{number}.{restart}" if number else step


def agents_folder(step: str) -> str:
    """World.job of the agents' own meeting in the step '43.0.1': '43.0a.1'."""
    head, _, restart = step.rpartition(".")
    return f"{head}a.{restart}"


def read(folder: Path) -> Iterator[Restart]:
    """All that are on record in the run folder; what cannot be read is left out."""
    with suppress(OSError):
        for line in (folder / run_folder.ELASTIC).read_text().splitlines():
            with suppress(ValueError, TypeError, AttributeError):
                yield from_json(line)


def furthest(folder: Path) -> int:
    """The step that rank 0 has told last, -1 before the first."""
    try:
        step = json.loads((folder / run_folder.PROGRESS).read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return -1
    return step if isinstance(step, int) else -1


def record(folder: Path, restart: Restart) -> None:
    """Raises OSError."""
    with (folder / run_folder.ELASTIC).open("a") as file:
        file.write(restart.to_json() + "\n")


def set_aside(folder: Path, job: str) -> None:
    """What the start `job` has left in errors/ and hang/ of the run folder. Raises OSError."""
    below = folder / run_folder.ERRORS
    aside = below / f"{ASIDE}{scratch.folder_name(job)}"
    for found in error_records.read(below):
        aside.mkdir(exist_ok=True)
        (below / found.record.name).replace(aside / found.record.name)
    hang = folder / hang_report.FOLDER / scratch.folder_name(job)
    if hang.is_dir():
        hang.replace(hang.with_name(f"{ASIDE}{hang.name}"))
