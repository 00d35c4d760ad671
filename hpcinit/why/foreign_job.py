"""A job that hpcinit did not submit: its logs, and what Slurm reports about it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from hpcinit.records import run_folder
from hpcinit.slurm import scontrol, slurm_client
from hpcinit.why import foreign_logs
from hpcinit.why.foreign_logs import Foreign

LIMIT = timedelta(seconds=15)
OURS = (run_folder.SCRIPT, run_folder.SPEC, run_folder.SWEEP, run_folder.SUBMISSION)
FIELDS = ("JobID", "State", "ExitCode", "DerivedExitCode", "MaxRSS", "NodeList", "Reason")
_OF_JOB = re.compile(r"(?:^|[^0-9])(\d+(?:_\d+)?)\.(?:out|err|log)$")  # slurm-123.out
OVER = {"FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"}


@dataclass(frozen=True)
class ForeignJob:
    """files: the logs that were read. slurm: the fields of sacct or scontrol, by their names, for JSON."""

    files: tuple[Path, ...]
    logs: Foreign
    slurm: Mapping[str, str] = field(default_factory=dict)

    @property
    def unknown(self) -> tuple[str, ...]:
        if self.slurm:
            return self.logs.unknown
        return (*self.logs.unknown, "how Slurm ended the job: sacct -j JOB -o State,ExitCode,MaxRSS shows it")


def find(name: str) -> ForeignJob | None:
    """Return the job whose logs are at the path `name`; None if it is no file, no folder with logs, or a run folder."""
    place = Path(name)
    if not name or not place.exists() or (place.is_dir() and any(_ours(place))):
        return None
    files = foreign_logs.files(place)
    if not files:
        return None
    job = next((found[1] for path in files if (found := _OF_JOB.search(path.name)) and "slurm" in path.name), "")
    shown = _shown(job) if job else {}
    return _job(files, (_accounted(job) or _renamed(shown)) if job else {}, place, scontrol.preempted_at(shown))


def _ours(place: Path) -> list[Path]:
    """Return the files of run folders at `place` or one level below it."""
    return [path for name in OURS for path in (*place.glob(name), *place.glob(f"*/{name}"))]


def of_slurm(job_id: str) -> ForeignJob | None:
    """Return the job with this id from Slurm; None if Slurm does not know it, or if it has neither a log nor failed."""
    if not re.fullmatch(r"\d+(_\d+)?", job_id):
        return None
    shown = _shown(job_id)
    known = _accounted(job_id) or _renamed(shown)
    if not known:
        return None
    names = {shown.get("StdOut", ""), shown.get("StdErr", ""), f"slurm-{job_id}.out"}
    files = sorted(path for name in names if name and (path := Path(name)).is_file())
    if not files and _state(known) not in OVER:
        return None
    return _job(files, known, None, scontrol.preempted_at(shown))


def _shown(job_id: str) -> dict[str, str]:
    return next(iter(scontrol.records(_output("scontrol", "--all", "show", "job", job_id), "JobId")), {})


def _job(files: list[Path], slurm: Mapping[str, str], place: Path | None, preempted_at: str) -> ForeignJob:
    state = _state(slurm)
    dumps = foreign_logs.dumps_in(place) if place else {}
    logs = foreign_logs.gather(foreign_logs.read(files), state if state in OVER else "", dumps, preempted_at)
    return ForeignJob(tuple(files), logs, slurm)


def _state(slurm: Mapping[str, str]) -> str:
    """Return the state without its reason: CANCELLED of 'CANCELLED by 1000'."""
    return slurm.get("State", "").partition(" ")[0]


def _accounted(job_id: str) -> dict[str, str]:
    """Return sacct's fields of the job and the largest MaxRSS of its steps; {} without accounting."""
    if not shutil.which("sacct"):
        return {}
    options = ("--noheader", "--parsable2", f"--format={','.join(FIELDS)}")
    rows = [line.split("|") for line in _output("sacct", f"--jobs={job_id}", *options).splitlines()]
    rows = [row for row in rows if len(row) == len(FIELDS)]
    if not rows:
        return {}
    most = max((row[4] for row in rows if row[4]), key=_kilobytes, default="")
    return dict(zip(FIELDS, rows[0], strict=True)) | {"MaxRSS": most}


def _kilobytes(text: str) -> float:
    """Return the size of '1234K' or '2.5G'."""
    found = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    return float(found[1]) * 1024.0 ** ("KMGT".find(found[2] or "K")) if found else 0.0


def _renamed(shown: Mapping[str, str]) -> dict[str, str]:
    """Return scontrol's fields with sacct's names."""
    names = {"JobID": "JobId", "State": "JobState", **{name: name for name in FIELDS[2:]}}
    return {name: shown[key] for name, key in names.items() if key in shown}


def _output(*command: str) -> str:
    try:
        done = slurm_client.run(list(command), at_most=LIMIT)
    except (slurm_client.Unreachable, OSError):
        return ""
    return done.stdout if done.status == 0 else ""
