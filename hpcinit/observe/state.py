"""The state of a run, in Slurm's words: from squeue, then sacct, then what the job itself left behind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcinit.facts import runfolder
from hpcinit.facts.errors import RequestError
from hpcinit.local import engine

# Slurm's words for a job that will not run again (squeue(1), JOB STATE CODES). What is not listed is not over.
ANSWER_S = 30  # longer than Slurm's MessageTimeout (10 s), after which its clients give up by themselves
NOBODY = "nobody"  # the source of a state when Slurm did not answer
FINAL = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
    "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """name: Slurm's word (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ...), or UNKNOWN.

    reason: why it waits or what ended it, as Slurm says. exit_status: once it has ended and is known.
    source: who told. by_hand: of the run's last attempt, which somebody started with the script, not hpcinit.
    link: 'job 2 of a chain of 5', or ''. others: jobs of the chain that are still in the queue beside this one.
    """

    name: str
    job_id: str
    engine: str
    reason: str = ""
    exit_status: int | None = None
    source: str = ""
    by_hand: bool = False
    link: str = ""
    others: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        return self.name in FINAL

    @property
    def forgotten(self) -> bool:
        """Slurm has answered, and knows nothing of the job, which left no word of its end either."""
        return self.name == "UNKNOWN" and self.source == ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path, ask: bool = True) -> State:
    """The state of the run in `path`. Raises RequestError if it is no run folder of a submitted job.

    ask: False where Slurm has just not answered: only what the job itself left behind is read.
    """
    record = submission(path)
    submitted, job_id = record["job_id"], last_job(path) or record["job_id"]
    if len(jobs(record)) > 1 and job_id in {*jobs(record), submitted}:
        return _chain(path, jobs(record), last_job(path), ask)
    if record["engine"] == "local":
        return _local(path, job_id) if job_id == submitted else _by_hand(path, job_id)
    state = _slurm(path, job_id, ask)
    if job_id == submitted:
        return state
    left = left_behind(path, job_id)
    # Run inside a job that goes on (salloc), the script ends before its job does.
    state = left if left.over and state.name == "RUNNING" else state
    return replace(state, by_hand=True)


def jobs(record: Mapping[str, Any]) -> list[str]:
    """The ids of all jobs that were submitted for the run, of its submission.json: one, or those of a chain."""
    return [str(job) for job in record.get("jobs", [record["job_id"]])]


def last_job(path: Path) -> str:
    """The id of the job that ran the script last: another than the submitted where it was started again by hand."""
    return str(_json(path / runfolder.EXIT).get("job", ""))


def exit_status(path: Path) -> int | None:
    """What the batch script of the last attempt ended with, as it says itself; None while it has not."""
    status = _json(path / runfolder.EXIT).get("exit_status")
    return status if isinstance(status, int) else None


def _slurm(path: Path, job_id: str, ask: bool) -> State:
    left = left_behind(path, job_id)
    if not ask:
        return left
    state = of_job(job_id, left)
    return replace(state, exit_status=left.exit_status) if state.over and left.over else state


def _chain(path: Path, ids: Sequence[str], last: str, ask: bool) -> State:
    """The state of a chain: what its last attempt has decided, or else of the job that runs, waits or was the last."""
    known: dict[str, State] = {}
    try:
        known = {state.job_id: state for state in _squeue(*ids)} if ask else {}
    except NoAnswer as error:
        if not _decided(path):
            return State("UNKNOWN", last or ids[0], "slurm", str(error), None, NOBODY)
    open_ = [job for job in ids if job in known and not known[job].over]
    going = sorted(open_, key=lambda job: known[job].name == "PENDING")  # the one that runs first
    if _decided(path) or not going:
        job_id = last or ids[-1]
        left = left_behind(path, job_id)
        state = left if _decided(path) or not ask else known.get(job_id) or of_job(job_id, left)
        state = replace(state, exit_status=left.exit_status) if state.over and left.over else state
    else:
        state = known[going[0]]
    number = ids.index(state.job_id) + 1
    others = tuple(job for job in open_ if job != state.job_id)
    return replace(state, link=f"job {number} of a chain of {len(ids)}", others=others)


def _decided(path: Path) -> bool:
    """Whether no later job of a chain goes on: an attempt has come to its end, or failed by itself."""
    status = exit_status(path)
    stopped = status == 0 and _json(path / runfolder.STOPPED).get("job") == last_job(path)
    return status not in (None, runfolder.ENDED_EARLY) and not stopped


def of_job(job_id: str, left: State | None = None) -> State:
    """What Slurm says of a job by its id, or `left` where it knows nothing of it."""
    unknown = left or State("UNKNOWN", job_id, "slurm")
    try:
        return next(iter(_squeue(job_id)), None) or _sacct(job_id) or unknown
    except NoAnswer as error:
        return State("UNKNOWN", job_id, "slurm", str(error), None, NOBODY)


def submission(path: Path) -> dict[str, Any]:
    """submission.json. Raises RequestError that says what is there instead."""
    try:
        document = json.loads((path / runfolder.SUBMISSION).read_text())
    except FileNotFoundError:
        if (path / runfolder.SCRIPT).exists():
            raise RequestError(f"{path} was never submitted: it has a script and no {runfolder.SUBMISSION}") from None
        raise RequestError(f"{path} is not a run folder: it has no {runfolder.SUBMISSION}") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path / runfolder.SUBMISSION} cannot be read: {error}") from None
    if not isinstance(document, dict) or not {"job_id", "engine"} <= set(document):
        raise RequestError(f"{path / runfolder.SUBMISSION} does not say job_id and engine; was it edited?")
    return document


def _local(path: Path, job_id: str) -> State:
    left = engine.read_state(path)
    reason = "the local engine ended without a word: killed, or no room for one" * (left.get("state") == "NODE_FAIL")
    return State(left.get("state", "UNKNOWN"), job_id, "local", reason, left.get("exit_status"), engine.STATE)


def _by_hand(path: Path, job_id: str) -> State:
    """`bash job.sh`, without the engine: all that is known is the script's own record."""
    attempt = _json(path / runfolder.EXIT)
    status = exit_status(path)
    if status is not None:
        return State("COMPLETED" if status == 0 else "FAILED", job_id, "local", "", status, runfolder.EXIT, True)
    alive = engine.is_alive({"pid": attempt.get("pid", 0), "started": attempt.get("began", 0)})
    return State("RUNNING" if alive else "NODE_FAIL", job_id, "local", "", None, runfolder.EXIT, True)


def _squeue(*job_ids: str) -> list[State]:
    """Of each job that is in the queue, or has left it not long ago."""
    # -t all: jobs that have ended stay here for MinJobAge (300 s).
    lines = ask_slurm("squeue", "--noheader", f"--jobs={','.join(job_ids)}", "--states=all", "--format=%i|%T|%r")
    states = []
    for line in lines:
        job_id, name, reason = line.split("|", 2)
        # A job that was cancelled while it waited keeps the reason why it waited.
        reason = "" if reason == "None" or name == "CANCELLED" else reason
        states.append(State(name, job_id, "slurm", reason, None, "squeue"))
    return states


def _sacct(job_id: str) -> State | None:
    lines = ask_slurm("sacct", "--noheader", "--parsable2", "-X", "--jobs", job_id, "--format=State,ExitCode")
    if not lines:
        return None
    name, _, code = lines[0].partition("|")
    words = name.split()  # 'CANCELLED by 1000'
    return State(words[0], job_id, "slurm", " ".join(words[1:]), status_of(code), "sacct")


def status_of(code: str) -> int | None:
    """The exit status of sacct's ExitCode: '3:0' is 3, '0:9' (a signal) 137; None where it does not say."""
    status, _, number = code.partition(":")
    return int(status) or (128 + int(number) if int(number or 0) else 0) if status.isdigit() else None


def left_behind(path: Path, job_id: str) -> State:
    """From exit.json: right with accounting off, and when Slurm has forgotten the job."""
    status = exit_status(path)
    if status is None:
        return State("UNKNOWN", job_id, "slurm", "Slurm does not know the job, and it left no exit record")
    return State("COMPLETED" if status == 0 else "FAILED", job_id, "slurm", "", status, runfolder.EXIT)


class NoAnswer(Exception):
    """Slurm did not say anything about the job, not even that it does not know it."""


def ask_slurm(*command: str) -> list[str]:
    """The answer's lines; none if there is no such job, or no accounting. Raises NoAnswer if nobody answers."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except FileNotFoundError:
        raise NoAnswer(f"{command[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{command[0]} did not answer in {ANSWER_S} s: is SLURM_CONF right, is the controller up?"
        ) from None
    if done.returncode == 0:
        return done.stdout.splitlines()
    # Without accounting sacct fails at once, and says so; a forgotten job is 'Invalid job id specified'.
    if command[0] == "sacct" or "Invalid job id" in done.stderr:
        return []
    raise NoAnswer(f"{command[0]}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'failed'}")


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
