"""Refuses a request that is already queued or running, because submitting it twice is usually a mistake."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import console
from hpcinit.base.errors import RequestError
from hpcinit.records import run_folder
from hpcinit.slurm.queue import Job, QueueQuery
from hpcinit.slurm.slurm_client import Unreachable
from hpcinit.slurm.tokens import MARK

# Requests that differ only in these keys are the same. If runs_dir differs, they are not: a user who chooses another
# folder for the results wants both jobs.
NOT_THE_JOB = ("again", "wait", "dry_run", "validate")
ENDING = "COMPLETING"  # the job is over, so submitting it again is intended


def request_hash(document: Mapping[str, Any], workdir: Path, runs_dir: Path, code: str = "") -> str:
    """Return 12 hexadecimal digits that identify a request: its config, program, arguments and folders.

    document: the composed config as plain containers.
    code: the hash of the code snapshot, or ''.

    Without a snapshot, changes to the program's file do not change the hash, because a job reads the file when it
    starts.
    """
    kept = {key: value for key, value in document.items() if key not in NOT_THE_JOB}
    text = json.dumps([kept, str(workdir), str(runs_dir), code], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find(jobs: Sequence[Job], request: str) -> Job | None:
    """Return the first of `jobs` that was submitted with this request, or None.

    request: the hash of the request.
    """
    return next((job for job in jobs if f"{MARK}{request}-" in job.comment and job.state != ENDING), None)


def refuse_duplicate(queued: QueueQuery, request: str) -> None:
    """Wait for squeue's reply, and raise RequestError if the request is already in the queue.

    Do not raise if the controller stays unreachable.

    queued: a query for the user's jobs.
    request: the hash of the request.
    """
    waiting = console.ProgressLine()
    try:
        jobs = queued.jobs(
            lambda: waiting.show("waiting for squeue, to check whether the same request is already queued")
        )
    except Unreachable:
        jobs = []
    waiting.end()
    if job := find(jobs, request):
        folder = Path(job.command.removesuffix(f"/{run_folder.SCRIPT}"))
        cancel = f"hpcinit cancel {shlex.quote(str(folder))}"
        raise RequestError(
            f"this request is already queued as job {job.base_id} ({job.state}, run folder {folder}); to submit it a "
            f"second time add again=true; to cancel the first: {cancel}"
        )
