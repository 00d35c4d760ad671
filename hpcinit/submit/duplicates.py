"""Refuse a request that is already queued or running: submitting it twice is usually a mistake."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcinit.base import console
from hpcinit.base.errors import RequestError
from hpcinit.records import run_folder
from hpcinit.slurm.queue import Job, QueueQuery
from hpcinit.slurm.slurm_client import Unreachable
from hpcinit.slurm.tokens import MARK

# Progress of slow steps, on stderr.

AGAIN_S = 60.0  # without a terminal, the same message is repeated after this time


class Waiting:
    """A progress line: updated in place in a terminal, else a new line for each new message."""

    def __init__(self) -> None:
        self._shown, self._at, self._started = "", 0.0, time.monotonic()
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, message: str) -> None:
        """Print `message` with the time since the start."""
        clock = time.monotonic()
        text = f"hpcinit: {message} ({clock - self._started:.0f} s)"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            _write(f"\r\x1b[K{text[:width]}")
        elif message != self._shown or clock - self._at >= AGAIN_S:
            _write(f"{text}\n")
            self._at = clock
        self._shown = message

    def end(self) -> None:
        """End the line, so that other output starts on a new one."""
        if self._terminal and self._shown:
            _write("\n")
        self._shown = ""


def _write(text: str) -> None:
    """Write to stderr. A closed terminal must not end a submission whose job exists."""
    if sys.stderr is not None and not console.quiet():  # `2>&-`
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


# These keys change how a job is submitted, not which job. Any other key makes a different request; runs_dir too,
# because another place for the results means that the user wants both.
NOT_THE_JOB = ("again", "wait", "dry_run", "validate")
ENDING = "COMPLETING"  # the job is over, so submitting it again is intended


def request_hash(document: Mapping[str, Any], workdir: Path, runs_dir: Path, code: str = "") -> str:
    """Return 12 hexadecimal digits that depend on config, program, arguments and folders.

    document: the composed config as plain containers. code: the hash of a snapshot. Without a snapshot, the content of
    the program's file does not count, because a job reads it when it starts.
    """
    kept = {key: value for key, value in document.items() if key not in NOT_THE_JOB}
    text = json.dumps([kept, str(workdir), str(runs_dir), code], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find(jobs: Sequence[Job], request: str) -> Job | None:
    """Return the first of `jobs` that was submitted by the request with this hash, or None."""
    return next((job for job in jobs if f"{MARK}{request}-" in job.comment and job.state != ENDING), None)


def refuse_duplicate(queued: QueueQuery, request: str) -> None:
    """Raise RequestError if the request is in the queue. Without a reply the submission waits for the controller."""
    waiting = Waiting()
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
            f"this request is already queued as job {job.base_id}: {job.state}, run folder {folder}; to submit it a "
            f"second time add again=true, to cancel the first: {cancel}"
        )
