"""What a rank that fails leaves: errors/rank-N.json in the run folder. The job writes it, the login node reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.facts import known_fields


@dataclass(frozen=True)
class ErrorRecord:
    """time: seconds since 1970, by the node's own clock. monotonic: seconds since the node came up, where steps of a
    clock that is set do not show. phase: 'start-up', 'training', 'saving', ... step: the last that was told, or -1.
    job: World.job, which names this start of this job and no other.
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

    @property
    def name(self) -> str:
        return f"rank-{self.rank}.json"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class Found:
    """written: when the record's file was, by the clock of whoever keeps the files (of NFS, the server)."""

    record: ErrorRecord
    written: float


def read(folder: Path, name: str = "rank-*.json") -> Iterator[Found]:
    """All of `folder`, a run's errors/, or the one of that name. What cannot be read, is half written or of another
    version is left out."""
    for path in _named(folder, name):
        try:
            record = known_fields.made(ErrorRecord, json.loads(path.read_text()))
            yield Found(record, path.stat().st_mtime)
        except (OSError, ValueError, TypeError, AttributeError):
            continue


def _named(folder: Path, name: str) -> list[Path]:
    try:
        return sorted(folder.glob(name))
    except OSError:  # a file server's: ESTALE, EIO
        return []


def of_last_attempt(found: list[Found], job_id: str, restart: int | None) -> list[Found]:
    """Those that the attempt left that ran last. job_id: '' where nobody says which that was.

    A record names its attempt 'JOB.STEP.RESTART'; torchrun and others write other names, and theirs are all kept.
    """
    kept = []
    for one in found:
        job, _, rest = one.record.job.partition(".")
        again = rest.rpartition(".")[2]
        other_job = job_id.isdigit() and job.isdigit() and job != job_id
        other_start = not other_job and restart is not None and again.isdigit() and int(again) != restart
        if not other_job and not other_start:
            kept.append(one)
    return kept
