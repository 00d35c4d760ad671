"""The record of a rank's error: errors/rank-N.json in the run folder.

The job writes the record on a compute node. Commands such as `hpcinit why` read it on the login node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.records import run_folder


@dataclass(frozen=True)
class ErrorRecord:
    """The error of one rank.

    time: seconds since 1970, by the node's clock.
    monotonic: seconds since the node booted. Unlike `time`, this value doesn't jump if the clock is set.
    phase: what the rank was doing: 'start-up', 'training', 'saving', ...
    step: the last reported training step, or -1.
    job: World.job, which is unique to this attempt.
    kind: the kind of an error that hpcinit raised (see base/failure_kinds.py). '' if another program raised it.
    rank_at_fault, host_at_fault: the rank whose failure caused this error, or None and '' if unknown.
    quoted: the output of another program that hpcinit's message quotes.
    """

    time: float
    rank: int
    host: str
    error: str
    traceback: str
    phase: str = ""
    step: int = -1
    job: str = ""
    monotonic: float = 0.0
    kind: str = ""
    rank_at_fault: int | None = None
    host_at_fault: str = ""
    quoted: str = ""

    @property
    def foreign(self) -> str:
        """Return the error message of the other program: the error itself, or the text that hpcinit's error quotes."""
        return self.quoted if self.kind else self.error

    @property
    def name(self) -> str:
        return f"rank-{self.rank}.json"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class Found:
    """An error record, and when its file was written according to the file server's clock."""

    record: ErrorRecord
    written: float


def read(folder: Path, name: str = "rank-*.json") -> Iterator[Found]:
    """Yield the error records in `folder` (errors/ of a run) whose file names match `name`.

    Files that are unreadable, incomplete or from another version are skipped.
    """
    for path in _named(folder, name):
        with suppress(OSError):
            if record := run_folder.read_record(ErrorRecord, path):
                yield Found(record, path.stat().st_mtime)


def _named(folder: Path, name: str) -> list[Path]:
    try:
        return sorted(folder.glob(name))
    except OSError:  # an error of the file server: ESTALE, EIO
        return []


def of_last_attempt(found: list[Found], job_id: str, restart: int | None) -> list[Found]:
    """Return the error records that belong to one attempt of a job.

    A record names its attempt as 'JOB.STEP.RESTART'. Records with other names, such as torchrun's, are always returned.

    job_id: Slurm's id of the job, or '' if unknown.
    restart: the number of the attempt, or None for any.
    """
    kept = []
    for one in found:
        job, _, rest = one.record.job.partition(".")
        number = rest.rpartition(".")[2]
        other_job = job_id.isdigit() and job.isdigit() and job != job_id
        other_start = not other_job and restart is not None and number.isdigit() and int(number) != restart
        if not other_job and not other_start:
            kept.append(one)
    return kept
