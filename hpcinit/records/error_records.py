"""What a rank that fails leaves: errors/rank-N.json in the run folder. The job writes it, the login node reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcinit.records import run_folder


@dataclass(frozen=True)
class ErrorRecord:
    """time: seconds since 1970, by the node's own clock. monotonic: seconds since the node came up, where steps of a
    clock that is set do not show. phase: 'start-up', 'training', 'saving', ... step: the last that was told, or -1.
    job: World.job, which names this start of this job and no other.

    kind: of base/errors.py if hpcinit raised the error, '' if another program did. rank_at_fault,
    host_at_fault: whose failure this is a consequence of, None and '' if not known. quoted: what hpcinit's message
    quotes of another program. hang: the fields of hang_report.HangReport, None for other errors.
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
    hang: Mapping[str, Any] | None = None

    @property
    def foreign(self) -> str:
        """The words of other programs: all of `error`, or `quoted` if hpcinit raised it."""
        return self.quoted if self.kind else self.error

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
            record = run_folder.from_known_fields(ErrorRecord, json.loads(path.read_text()))
            _check_types(record)
            yield Found(record, path.stat().st_mtime)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            continue


TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("time", "monotonic"), (int, float)),
    **dict.fromkeys(("rank", "step"), (int,)),
    **dict.fromkeys(("host", "error", "traceback", "phase", "job", "kind", "host_at_fault", "quoted"), (str,)),
    "rank_at_fault": (int, type(None)),
    "hang": (dict, type(None)),
}


def _check_types(record: ErrorRecord) -> None:
    """Raise ValueError for a value of another type than its field's: no reader has to expect it."""
    for name, types in TYPES.items():
        if not isinstance(getattr(record, name), types):
            raise ValueError(f"{name} is {getattr(record, name)!r:.40}, expected {types[0].__name__}")


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
