"""Records restarts inside a job (launch=torchrun or restart.warm) in elastic.jsonl, one line per restart.

Before each restart, hpcinit moves the error records and hang reports of the failed attempt to a folder `before-...`.
After that, the run folder contains only the records of the last attempt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.base.text import brief
from hpcinit.records import run_folder, scratch

LATEST = 1e11  # seconds since 1970: the year 5138
LOST = "its node was lost"  # Restart.how, if a spare node has replaced the node
ASIDE = "before-"  # errors/before-43.0.0/, hang/before-43.0.0/
# Environment variable of the ranks after a warm restart: the number of the restart in this step, 1 for the first.
ENV_ROUND = "HPCINIT_ROUND"
# The phases of a warm restart, in order. 'detect' ends when hpcinit orders all ranks to end, 'end' when the last rank
# has ended, 'fork' when the new ranks are forked. 'rendezvous' ends when init() returns, 'load' when run.load()
# returns, and 'first_step' at the first run.progress().
PHASES = ("detect", "end", "fork", "rendezvous", "load", "first_step")


@dataclass(frozen=True)
class Restart:
    """One restart of all ranks.

    job: World.job of the attempt that failed.
    number: counts the restarts within this Slurm step, from 1.
    how: how the failed process ended, such as 'Killed' or 'Exited with exit code 1'.
    error: the rank's error on one line, or ''.
    step: the last reported training step, or -1.
    time: seconds since 1970.
    secondary: whether another rank's failure caused this error.
    furthest: the highest step that a rank of the first node has reported or saved. -1 unless this is a warm restart.
    phases: the duration in seconds of each phase in PHASES that has ended.
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
    furthest: int = -1
    phases: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = (self.number, self.rank, self.step, self.furthest)
        if not 0 <= self.time < LATEST or any(not -1 <= one < 2**31 for one in numbers):
            raise ValueError(f"a field is out of range: {asdict(self)}")
        if not all(isinstance(value, (int, float)) for value in self.phases.values()):
            raise ValueError(f"phases is {self.phases!r:.40}, expected a dict with seconds as values")

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.how}" + (f" ({self.error})" if self.error else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(line: str) -> Restart:
    """Parse one line of elastic.jsonl as a Restart.

    Raise ValueError, TypeError or AttributeError if that is not possible.
    """
    try:
        return run_folder.from_known_fields(Restart, json.loads(line))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def cause(found: Sequence[Restart]) -> Restart:
    """Return the earliest restart whose error is not secondary, or the earliest of all if all errors are secondary."""
    return min(found, key=lambda one: (one.secondary, one.time))


def round_folder(step: str, number: int) -> str:
    """Return World.job of the ranks after restart `number` inside the job, such as '43.0e2.1'.

    In this example, the job is 43, the step 0, the restart 2 and the requeue 1. Without a restart (0), return `step`.
    Some folders in the run folder are named like this.
    """
    head, _, restart = step.rpartition(".")
    return f"{head}e{number}.{restart}" if number else step


def agents_folder(step: str) -> str:
    """Return World.job for the rendezvous of torchrun's agents or of fork servers, such as '43.0a.1' for '43.0.1'."""
    head, _, restart = step.rpartition(".")
    return f"{head}a.{restart}"


def read(folder: Path) -> Iterator[Restart]:
    """Yield the restarts that the run folder records. Unreadable lines are skipped.

    A warm restart gets a second line when all its phases are complete. That line replaces the first.
    """
    found: dict[tuple[str, int], Restart] = {}
    for one in run_folder.read_lines(Restart, folder / run_folder.ELASTIC):
        found[one.job, one.number] = one
    yield from found.values()


def of_failure(folder: Path, job: str, number: int, rank: int, host: str, status: int, step: int) -> Restart:
    """Return the Restart to record after a rank failed, with the error that the rank recorded in the attempt `job`.

    status: the exit status of the rank, such as -9 for SIGKILL.
    step: the last training step that the rank reported, or -1 if unknown.
    """
    from hpcinit.records import causes, error_records, job_log  # noqa: PLC0415 - as in set_aside()

    records = error_records.read(folder / run_folder.ERRORS, f"rank-{rank}.json")
    record = next((one.record for one in records if one.record.job == job), None)
    return Restart(
        job=job,
        number=number,
        time=record.time if record else time.time(),
        rank=rank,
        host=host,
        how=job_log.how(status),
        error=brief(record.error) if record else "",
        step=step,
        secondary=bool(record and causes.is_secondary(record)),
    )


def furthest(folder: Path) -> int:
    """Return the last training step that rank 0 reported, or -1 if it has not reported any."""
    step = safe_files.json_or_empty(folder / run_folder.PROGRESS).get("step")
    return step if isinstance(step, int) else -1


def lost_nodes(folder: Path, job: str, attempt: int) -> list[str]:
    """Return the nodes that spare nodes have replaced in one attempt of the job.

    attempt: SLURM_RESTART_COUNT of the attempt.
    """
    names = ((one.job.partition(".")[0], one.job.rpartition(".")[2], one) for one in read(folder))
    return [one.host for number, count, one in names if (number, count, one.how) == (job, str(attempt), LOST)]


def record(folder: Path, restart: Restart) -> None:
    """Append a restart to elastic.jsonl. Raise OSError if the file cannot be written."""
    safe_files.append(folder / run_folder.ELASTIC, restart.to_json() + "\n")


def set_aside(folder: Path, job: str) -> None:
    """Move the error records and hang reports of the attempt `job` to folders named `before-JOB`.

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
