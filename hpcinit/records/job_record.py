"""What a run folder records about its jobs: submission.json, and exit.json for the last attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files
from hpcinit.base.errors import RequestError
from hpcinit.records import run_folder

_submissions: dict[str, dict[str, Any]] = {}  # submission.json as last read; `status` needs it again


@dataclass(frozen=True)
class JobRecord:
    """The jobs of a run.

    submission: the content of submission.json.
    attempt: the content of exit.json, or {} before the first start.
    """

    path: Path
    submission: Mapping[str, Any]
    attempt: Mapping[str, Any]

    @property
    def submitted(self) -> str:
        """Return the id of the job that was submitted. For a chain, that is the first job."""
        return str(self.submission["job_id"])

    @property
    def last(self) -> str:
        """Return the id of the job that last ran the batch script, or ''.

        hpcinit did not submit this job if the user started the script manually.
        """
        return str(self.attempt.get("job", ""))

    @property
    def job_id(self) -> str:
        return self.last or self.submitted

    @property
    def jobs(self) -> list[str]:
        return jobs(self.submission)

    @property
    def is_chain(self) -> bool:
        return len(self.jobs) > 1 and (not self.last or self.last in self.jobs)

    @property
    def exit_status(self) -> int | None:
        """Return the exit status that the batch script of the last attempt recorded, or None if it has not ended."""
        status = self.attempt.get("exit_status")
        return status if isinstance(status, int) else None

    @property
    def restart(self) -> int | None:
        """Return the number of the last attempt (0 for the first), or None if the job has not started."""
        number = self.attempt.get("restart")
        return number if isinstance(number, int) else None

    @property
    def clusters(self) -> str:
        """Return the Slurm cluster of the jobs (cluster.clusters), or '' for the default cluster or without Slurm."""
        return str(self.submission.get("clusters", ""))


def read(path: Path) -> JobRecord:
    """Return what is recorded about the jobs of the run in `path`.

    Raise RequestError if submission.json is not usable.
    """
    return JobRecord(path, submission(path), safe_files.json_or_empty(f"{path}/{run_folder.EXIT}"))


def submission(path: Path) -> dict[str, Any]:
    """Return the content of submission.json.

    If it is not usable, raise RequestError that describes what the folder contains.
    """
    try:
        document = safe_files.read_json(f"{path}/{run_folder.SUBMISSION}")
    except FileNotFoundError:
        if (path / run_folder.SCRIPT).exists():
            raise RequestError(_unsubmitted(path)) from None
        raise RequestError(f"{path} is not a run folder: it has no {run_folder.SUBMISSION}") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path / run_folder.SUBMISSION} cannot be read: {error}") from None
    if not isinstance(document, dict) or not {"job_id", "engine"} <= set(document):
        raise RequestError(f"{path / run_folder.SUBMISSION} has no keys job_id and engine. Was this file edited?")
    _submissions[str(path)] = document
    return document


def last_submission(path: Path) -> dict[str, Any]:
    """Return the content of submission.json. Read the file only if this process has not read it before.

    Raise RequestError if it is not usable.
    """
    return _submissions.get(str(path)) or submission(path)


def jobs(record: Mapping[str, Any]) -> list[str]:
    """Return the ids of the jobs in the content of submission.json: one id, or those of a whole chain."""
    return [str(job) for job in record.get("jobs", [record["job_id"]])]


def last_job(path: Path) -> str:
    """Return the id of the job that last ran the batch script, or ''.

    hpcinit did not submit this job if the user started the script manually.
    """
    return str(safe_files.json_or_empty(path / run_folder.EXIT).get("job", ""))


def exit_status(path: Path) -> int | None:
    """Return the exit status that the batch script of the last attempt recorded, or None if it has not ended."""
    status = safe_files.json_or_empty(path / run_folder.EXIT).get("exit_status")
    return status if isinstance(status, int) else None


def clusters(path: Path) -> str:
    """Return the Slurm cluster of the run's jobs (cluster.clusters), or '' for the default cluster."""
    try:
        return str(last_submission(path).get("clusters", ""))
    except RequestError:
        return ""


def _unsubmitted(path: Path) -> str:
    """Return an error message about a run folder whose submission was never confirmed (MaybeSubmitted)."""
    if job := last_job(path):
        ended = exit_status(path)
        return (
            f"{path} has no {run_folder.SUBMISSION}, but job {job} started its script"
            + (f" and ended with exit status {ended}" if ended is not None else f"; see squeue --jobs={job}")
            + f"; its logs are in {path / run_folder.LOGS}"
        )
    return (
        f"{path} has a batch script but no {run_folder.SUBMISSION}: hpcinit was killed during the submission, or Slurm "
        f"did not confirm the job. {how_to_find(path)}"
    )


def how_to_find(path: Path) -> str:
    """Return the commands that find and cancel the unrecorded jobs of a run or sweep in the folder `path`."""
    return (
        f"To find the job: squeue --all --me --states=all --format='%A %T %o' | grep -F {path.absolute()}/ ; "
        "no output means that nothing was submitted. To cancel the job: scancel JOB"
    )
