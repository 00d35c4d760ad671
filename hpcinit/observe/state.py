"""The state of a run, in Slurm's words: from squeue, then sacct, then what the job itself left behind."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcinit.facts import runfolder
from hpcinit.facts.errors import RequestError
from hpcinit.local import engine

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "SUSPENDED"}
ACTIVE = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED"}


@dataclass(frozen=True)
class State:
    """name: Slurm's word (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ...), or UNKNOWN.

    reason: why it waits or what ended it, as Slurm says. exit_status: once it has ended and is known.
    source: who told.
    """

    name: str
    job_id: str
    engine: str
    reason: str = ""
    exit_status: int | None = None
    source: str = ""

    @property
    def over(self) -> bool:
        return self.name not in WAITING | ACTIVE | {"UNKNOWN"}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path) -> State:
    """The state of the run in `path`. Raises RequestError if it is no run folder of a submitted job."""
    record = submission(path)
    if record["engine"] == "local":
        return _local(path, record["job_id"])
    state = _squeue(record["job_id"]) or _sacct(record["job_id"]) or _left_behind(path, record["job_id"])
    if not state.over:
        return state
    left = _left_behind(path, record["job_id"])
    return state if left.exit_status is None else replace(state, exit_status=left.exit_status)


def submission(path: Path) -> dict[str, Any]:
    """submission.json. Raises RequestError that says what is there instead."""
    try:
        document: dict[str, Any] = json.loads((path / runfolder.SUBMISSION).read_text())
    except (OSError, ValueError):
        if (path / runfolder.SCRIPT).exists():
            raise RequestError(f"{path} was never submitted: it has a script and no {runfolder.SUBMISSION}") from None
        raise RequestError(f"{path} is not a run folder: it has no {runfolder.SUBMISSION}") from None
    return document


def _local(path: Path, job_id: str) -> State:
    left = engine.read_state(path)
    reason = "the local engine was killed" if left.get("state") == "NODE_FAIL" else ""
    return State(left.get("state", "UNKNOWN"), job_id, "local", reason, left.get("exit_status"), engine.STATE)


def _squeue(job_id: str) -> State | None:
    # -t all: jobs that have ended stay here for MinJobAge (300 s).
    lines = _ask("squeue", "--noheader", "--jobs", job_id, "--states=all", "--format=%T|%r")
    if not lines:
        return None
    name, _, reason = lines[0].partition("|")
    return State(name, job_id, "slurm", "" if reason == "None" else reason, None, "squeue")


def _sacct(job_id: str) -> State | None:
    lines = _ask("sacct", "--noheader", "--parsable2", "-X", "--jobs", job_id, "--format=State,ExitCode")
    if not lines:
        return None
    name, _, code = lines[0].partition("|")
    words = name.split()  # 'CANCELLED by 1000'
    status, _, number = code.partition(":")
    exit_status = int(status) or (128 + int(number) if int(number or 0) else 0) if status.isdigit() else None
    return State(words[0], job_id, "slurm", " ".join(words[1:]), exit_status, "sacct")


def _left_behind(path: Path, job_id: str) -> State:
    """From exit.json: right with accounting off, and when Slurm has forgotten the job."""
    status = _json(path / runfolder.EXIT).get("exit_status")
    if not isinstance(status, int):
        return State("UNKNOWN", job_id, "slurm", "Slurm does not know the job, and it left no exit record")
    return State("COMPLETED" if status == 0 else "FAILED", job_id, "slurm", "", status, runfolder.EXIT)


def _ask(*command: str) -> list[str]:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _json(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document
