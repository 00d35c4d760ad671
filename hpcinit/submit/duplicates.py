"""The same request submitted twice is mostly a slip: report the job that waits or runs already."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpcinit.base import console
from hpcinit.base.errors import RequestError
from hpcinit.records import run_folder
from hpcinit.slurm.queue import Job, QueueQuery
from hpcinit.slurm.slurm_client import Unreachable
from hpcinit.slurm.tokens import MARK

# One line on stderr for what takes its time: updated in place in a terminal, else a line for each new message.

AGAIN_S = 60.0  # without a terminal the same message is repeated so often


class Waiting:
    """Shows nothing until told to."""

    def __init__(self) -> None:
        self._said, self._at, self._began = "", 0.0, time.monotonic()
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, message: str) -> None:
        """`message`, and for how long this has taken."""
        clock = time.monotonic()
        text = f"hpcinit: {message} ({clock - self._began:.0f} s)"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            _write(f"\r\x1b[K{text[:width]}")
        elif message != self._said or clock - self._at >= AGAIN_S:
            _write(f"{text}\n")
            self._at = clock
        self._said = message

    def end(self) -> None:
        """What is printed next stands on a line of its own."""
        if self._terminal and self._said:
            _write("\n")
        self._said = ""


def _write(text: str) -> None:
    """A terminal that was closed meanwhile must not end a submission whose job exists."""
    if sys.stderr is not None and not console.quiet():  # `2>&-`
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


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


def refuse_duplicate(queued: QueueQuery, request: str) -> None:
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
        folder = Path(job.command.removesuffix(f"/{run_folder.SCRIPT}"))
        cancel = f"hpcinit cancel {shlex.quote(str(folder))}"
        raise RequestError(
            f"already queued as {job.base_id}: {job.state}, run folder {folder}; expected a request that differs in "
            f"something: again=true submits this one a second time, `{cancel}` ends the first"
        )


# Ctrl-C, a closed terminal and SIGTERM while a job is being submitted.


@contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """Ctrl-C between sbatch's start and the record of its job id would lose a job: note it, act after.

    A closed terminal (SIGHUP) and SIGTERM too. What is ignored (nohup, a script's `&`) stays ignored.
    """
    noted: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # signals come to no other
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
