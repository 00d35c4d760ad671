"""The state of a run, in Slurm's words: from squeue, then sacct, then scontrol, then what the job itself left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcinit.base.errors import RequestError
from hpcinit.observe.job_state import NOBODY, Known, State, of_slurm, state_of
from hpcinit.records import run_folder
from hpcinit.slurm import queue
from hpcinit.slurm.queue import JobQuery, SlurmReply

__all__ = ["NOBODY", "State"]  # of observe/job_state.py
FEW = 20  # of more runs at once squeue is started before their folders are read


def read(path: Path) -> State:
    """The state of the run in `path`. Raises RequestError if it is no run folder of a submitted job."""
    [state] = read_all([path])
    if isinstance(state, RequestError):
        raise state
    return state


def read_all(paths: Sequence[Path]) -> list[State | RequestError]:
    """The state of each run, in their order, from one question to Slurm; the error of one that is none."""
    early = queue.QueueQuery("--me", ended=True) if len(paths) > FEW else None  # runs while we read
    runs = [_run(path) for path in paths]
    wanted = [run.wanted for run in runs if isinstance(run, _Run)]
    answer = queue.query([want for want in wanted if want], early)
    away = bool(answer.unreachable)
    runs = [run if isinstance(run, RequestError) else _fresh(run, answer) for run in runs]
    return [run if isinstance(run, RequestError) else _begun(run, _state(run, answer), away) for run in runs]


@dataclass(frozen=True)
class _Run:
    """submitted: the id of the (first) job of submission.json. last: that of the last attempt, as exit.json says."""

    path: Path
    engine: str
    submitted: str
    jobs: Sequence[str]
    last: str
    left: State

    @property
    def is_chain(self) -> bool:
        return len(self.jobs) > 1 and (not self.last or self.last in self.jobs)

    @property
    def wanted(self) -> JobQuery | None:
        """What to ask Slurm for; None where it knows nothing of the run."""
        if self.engine == "local":
            return None
        if self.is_chain:
            return JobQuery(self.jobs, self.last or self.jobs[-1], self.left.over)
        return JobQuery([self.left.job_id], self.left.job_id, self.left.over)


def _run(path: Path) -> _Run | RequestError:
    try:
        record = submission(path)
    except RequestError as error:
        return error
    ids, attempt = jobs(record), _json(f"{path}/{run_folder.EXIT}")
    last = str(attempt.get("job", ""))
    left = _left(attempt, last or str(record["job_id"]))
    return _Run(path, record["engine"], str(record["job_id"]), ids, last, left)


def _begun(run: _Run, now: State, away: bool) -> State:
    of_it = run.last == now.job_id and run.left.restart is not None
    if not of_it and not away:
        return now
    return replace(now, restart=run.left.restart if of_it else None, away=away and run.engine != "local")


def _fresh(run: _Run, answer: SlurmReply) -> _Run:
    """With the record of a script that has ended after it was looked for and before Slurm was asked."""
    now = _known(answer, run.left.job_id)
    if now is None or not now.over or run.left.over:
        return run
    attempt = _json(f"{run.path}/{run_folder.EXIT}")
    return replace(run, left=_left(attempt, now.job_id)) if attempt.get("job") == now.job_id else run


def _state(run: _Run, answer: SlurmReply) -> State:
    if run.is_chain:
        return _chain(run, answer)
    job_id = run.left.job_id
    if run.engine == "local":
        return _local(run.path, job_id) if job_id == run.submitted else _by_hand(run.path, job_id)
    state = _of_job(run, job_id, answer)
    if job_id == run.submitted:
        return state
    # Run inside a job that goes on (salloc), the script ends before its job does.
    state = run.left if run.left.over and state.name == "RUNNING" else state
    return replace(state, by_hand=True)


def _known(answer: SlurmReply, job_id: str) -> State | None:
    job = answer.jobs.get(job_id)
    return of_slurm(job) if job else None


def _of_job(run: _Run, job_id: str, answer: SlurmReply) -> State:
    """Return the state of a job of `run`, from Slurm and the run folder."""
    record = run.left if run.left.job_id == job_id else replace(run.left, job_id=job_id)

    def cancelled() -> bool:
        return job_id in _json(run.path / run_folder.CANCELLED).get("jobs", [])

    return state_of(Known(_known(answer, job_id), record, answer.unreachable, cancelled))


def jobs(record: Mapping[str, Any]) -> list[str]:
    """The ids of all jobs that were submitted for the run, of its submission.json: one, or those of a chain."""
    return [str(job) for job in record.get("jobs", [record["job_id"]])]


def last_job(path: Path) -> str:
    """The id of the job that ran the script last: another than the submitted where it was started again by hand."""
    return str(_json(path / run_folder.EXIT).get("job", ""))


def exit_status(path: Path) -> int | None:
    """What the batch script of the last attempt ended with, as it says itself; None while it has not."""
    status = _json(path / run_folder.EXIT).get("exit_status")
    return status if isinstance(status, int) else None


def _chain(run: _Run, answer: SlurmReply) -> State:
    """The state of a chain: what its last attempt has decided, or else of the job that runs, waits or was the last."""
    decided = _decided(run.path)
    said = {job: of_slurm(now) for job, now in answer.jobs.items() if job in run.jobs}
    open_ = [job for job in run.jobs if job in said and not said[job].over and said[job].source != "sacct"]
    going = sorted(open_, key=lambda job: said[job].name == "PENDING")  # the one that runs first
    if answer.unreachable and not decided:
        state = State("UNKNOWN", run.last or run.jobs[0], "slurm", answer.unreachable, None, NOBODY)
    elif decided or not going:
        job_id = run.last or run.jobs[-1]
        running = decided and job_id in open_  # it has left its record, and is not gone yet
        state = replace(run.left, job_id=job_id) if running else _of_job(run, job_id, answer)
    else:
        state = said[going[0]]
    number = run.jobs.index(state.job_id) + 1
    others = tuple(job for job in open_ if job != state.job_id)
    return replace(state, link=f"job {number} of a chain of {len(run.jobs)}", others=others)


def _decided(path: Path) -> bool:
    """Whether no later job of a chain goes on: an attempt has come to its end, or failed by itself."""
    status = exit_status(path)
    stopped = status == 0 and (path / run_folder.STOPPED).exists()
    return status not in (None, run_folder.ENDED_EARLY) and not stopped


def of_array(job_id: str) -> list[State]:
    """What Slurm says of each task of an array ('4242'), as far as it remembers them, or of the one job that it is."""
    answer = queue.query([JobQuery([job_id], job_id)])
    tasks = [of_slurm(now) for one, now in answer.jobs.items() if one.startswith(f"{job_id}_")]
    unknown = State("UNKNOWN", job_id, "slurm")
    return tasks or [state_of(Known(_known(answer, job_id), unknown, answer.unreachable))]


def submission(path: Path) -> dict[str, Any]:
    """submission.json. Raises RequestError that says what is there instead."""
    try:
        with open(f"{path}/{run_folder.SUBMISSION}", "rb", buffering=0) as file:  # noqa: PTH123 - as in _json
            document = json.loads(file.read())
    except FileNotFoundError:
        if (path / run_folder.SCRIPT).exists():
            raise RequestError(_unsubmitted(path)) from None
        raise RequestError(f"{path} is not a run folder: it has no {run_folder.SUBMISSION}") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path / run_folder.SUBMISSION} cannot be read: {error}") from None
    if not isinstance(document, dict) or not {"job_id", "engine"} <= set(document):
        raise RequestError(f"{path / run_folder.SUBMISSION} does not say job_id and engine; was it edited?")
    return document


def _unsubmitted(path: Path) -> str:
    """What is known of a folder that stayed although its submission was not told as done (MaybeSubmitted)."""
    script, job = path.absolute() / run_folder.SCRIPT, last_job(path)
    if job:
        ended = exit_status(path)
        return (
            f"{path} has no {run_folder.SUBMISSION}, but job {job} has begun its script"
            + (f" and ended with exit status {ended}" if ended is not None else f": squeue --jobs={job} tells of it")
            + f"; its logs are in {path / run_folder.LOGS}"
        )
    return (
        f"{path} has a script and no {run_folder.SUBMISSION}: hpcinit was ended while it submitted, or nobody could "
        "say whether there is a job. Look for it: squeue --all --me --states=all --format='%i %T %o' | "
        f"grep -F {script} ; "
        "without one nothing was submitted"
    )


def _local(path: Path, job_id: str) -> State:
    from hpcinit.local import engine  # noqa: PLC0415 - psutil, only where there is no Slurm

    left = engine.read_state(path)
    reason = "the local engine ended without a word: killed, or no room for one" * (left.get("state") == "NODE_FAIL")
    return State(left.get("state", "UNKNOWN"), job_id, "local", reason, left.get("exit_status"), engine.STATE)


def _by_hand(path: Path, job_id: str) -> State:
    """`bash job.sh`, without the engine: all that is known is the script's own record."""
    from hpcinit.local import engine  # noqa: PLC0415

    attempt = _json(path / run_folder.EXIT)
    status = exit_status(path)
    if status is not None:
        return State("COMPLETED" if status == 0 else "FAILED", job_id, "local", "", status, run_folder.EXIT, True)
    alive = engine.is_alive({"pid": attempt.get("pid", 0), "started": attempt.get("began", 0)})
    return State("RUNNING" if alive else "NODE_FAIL", job_id, "local", "", None, run_folder.EXIT, True)


def _left(attempt: Mapping[str, Any], job_id: str) -> State:
    status, number = attempt.get("exit_status"), attempt.get("restart")
    restart = number if isinstance(number, int) else None
    if not attempt:
        never = (
            "Slurm does not know the job any more, and it never began: was it cancelled while it waited? A controller "
            "that is killed forgets what it took up to 5 s before: hpcinit resubmit (cluster.submit_confirm=true looks "
            "again)"
        )
        return State("UNKNOWN", job_id, "slurm", never)
    if not isinstance(status, int):
        lost = "Slurm does not know the job any more, and it left no exit record"
        return State("UNKNOWN", job_id, "slurm", lost, restart=restart)
    name = "COMPLETED" if status == 0 else "FAILED"
    return State(name, job_id, "slurm", "", status, run_folder.EXIT, restart=restart)


def _json(path: str | Path) -> dict[str, Any]:
    try:
        # Three of each of a thousand runs: Path.open() takes twice as long, and a buffer as long again.
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            document = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
