"""The same request submitted twice is a slip more often than a wish: what waits or runs already is named."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.facts import runfolder
from hpcinit.facts.errors import RequestError
from hpcinit.slurm.client import Unreachable
from hpcinit.slurm.queue import Job, QueueQuery
from hpcinit.slurm.tokens import MARK
from hpcinit.submission.waiting import Waiting

# Keys that say how to submit, not what. Everything else makes another request, runs_dir too: who asks for the results
# in another place wants both.
NOT_THE_JOB = ("again", "wait", "dry_run", "test_only")
ENDING = "COMPLETING"  # its processes are gone or going: submitting again is no slip


def request_hash(document: Mapping[str, Any], workdir: Path, runs_dir: Path, code: str = "") -> str:
    """12 hexadecimal digits: the same for the same config, program, arguments and folders.

    document: the composed config as plain containers. code: the hash of a snapshot. Without one, what the program's
    file holds is no part of the request: a job reads it when it starts.
    """
    kept = {key: value for key, value in document.items() if key not in NOT_THE_JOB}
    text = json.dumps([kept, str(workdir), str(runs_dir), code], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find(jobs: Sequence[Job], request: str) -> Job | None:
    """The first of `jobs` that was made by the request with this hash."""
    return next((job for job in jobs if f"{MARK}{request}-" in job.comment and job.state != ENDING), None)


def refuse(queued: QueueQuery, request: str) -> None:
    """Raise RequestError if the request is in the queue. Without a reply the submission waits for the controller."""
    waiting = Waiting()
    try:
        jobs = queued.jobs(
            lambda: waiting.show("waiting for squeue, to see whether the same request is queued already")
        )
    except Unreachable:
        jobs = []
    waiting.end()
    if job := find(jobs, request):
        folder = Path(job.command.removesuffix(f"/{runfolder.SCRIPT}"))
        cancel = f"hpcinit cancel {shlex.quote(str(folder))}"
        raise RequestError(
            f"already queued as {job.base_id}: {job.state}, run folder {folder}; expected a request that differs in "
            f"something: again=true submits this one a second time, `{cancel}` ends the first"
        )
