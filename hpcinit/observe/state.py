"""Reads the state of a run, with Slurm's names: from squeue, then sacct, then scontrol, then the run folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files
from hpcinit.base.errors import RequestError
from hpcinit.observe.job_state import NO_REPLY, Known, State, of_slurm, state_of
from hpcinit.records import run_folder
from hpcinit.slurm import queue, slurm_client, tokens
from hpcinit.slurm.queue import JobQuery, SlurmReply

__all__ = ["NO_REPLY", "State"]  # of observe/job_state.py
_PART = 1 << 16  # bytes
FEW = 20  # for more runs, squeue starts before their folders are read
_submissions: dict[str, dict[str, Any]] = {}  # submission.json as last read, which `status` needs again


def read(path: Path) -> State:
    """Return the state of the run in `path`. Raise RequestError if it is not the run folder of a submitted job."""
    [state] = read_all([path])
    if isinstance(state, RequestError):
        raise state
    return state


def read_all(paths: Sequence[Path], early: queue.QueueQuery | None = None) -> list[State | RequestError]:
    """Return the state of each run, or its RequestError, in the order of `paths`, with one query of Slurm.

    early: a started squeue for all jobs of the user.
    """
    with slurm_client.on_cluster(None):
        started = queue.QueueQuery("--me", ended=True) if early is None and len(paths) > FEW else None  # runs meanwhile
    runs = [_run(path) for path in paths]
    wanted: dict[str, list[JobQuery]] = {"": []}  # by cluster: two clusters may give the same job id
    for run in runs:
        if isinstance(run, _Run) and (query := run.wanted):
            wanted.setdefault(run.clusters, []).append(query)
    if started and not wanted[""]:
        started.drop()
    answers = {name: _answer(name, queries, early or started) for name, queries in wanted.items()}
    return [run if isinstance(run, RequestError) else _now(run, answers[run.clusters]) for run in runs]


def _answer(name: str, queries: Sequence[JobQuery], early: queue.QueueQuery | None) -> SlurmReply:
    """Return the reply of the cluster `name`. If it is '', `early` has queried SLURM_CONF's cluster already."""
    with slurm_client.on_cluster(name):
        return queue.query(queries, None if name else early)


def _now(run: _Run, answer: SlurmReply) -> State:
    answer = replace(answer, jobs={job_id: job for job_id in run.ids if (job := run.own(answer.jobs.get(job_id)))})
    run = _refreshed(run, answer)
    return _with_attempt(run, _state(run, answer), bool(answer.unreachable))


@dataclass(frozen=True)
class _Run:
    """The content of the run folder. submitted: the first job in submission.json. last: the last job in exit.json."""

    path: Path
    engine: str
    submitted: str
    jobs: Sequence[str]
    last: str
    left: State
    clusters: str  # '' for the cluster of SLURM_CONF, and without Slurm
    record: Mapping[str, Any]  # submission.json

    @property
    def ids(self) -> set[str]:
        return {*self.jobs, self.left.job_id}

    def own(self, job: queue.Job | None) -> queue.Job | None:
        return None if job and is_other(self.record, job.job_id, job.comment, job.command) else job

    @property
    def is_chain(self) -> bool:
        return len(self.jobs) > 1 and (not self.last or self.last in self.jobs)

    @property
    def wanted(self) -> JobQuery | None:
        """Return the query for Slurm, or None for a run without Slurm."""
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
    name = record.get("clusters", "") if record["engine"] == "slurm" else ""
    return _Run(path, record["engine"], str(record["job_id"]), ids, last, left, name, record)


def _with_attempt(run: _Run, now: State, away: bool) -> State:
    is_its_attempt = run.last == now.job_id and run.left.restart is not None
    if not is_its_attempt and not away:
        return now
    return now._replace(restart=run.left.restart if is_its_attempt else None, away=away and run.engine != "local")


def _refreshed(run: _Run, answer: SlurmReply) -> _Run:
    """Return `run` with the record of a script that ended after the folder was read and before Slurm was queried."""
    now = answer.jobs.get(run.left.job_id)
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
    # Inside an allocation (salloc), the script ends before its job does.
    state = run.left if run.left.over and state.name == "RUNNING" else state
    return state._replace(by_hand=True)


def _known(answer: SlurmReply, job_id: str) -> State | None:
    job = answer.jobs.get(job_id)
    return of_slurm(job) if job else None


def _of_job(run: _Run, job_id: str, answer: SlurmReply) -> State:
    """Return the state of a job of `run`, from Slurm and the run folder."""
    record = run.left if run.left.job_id == job_id else run.left._replace(job_id=job_id)

    def cancelled() -> bool:
        return job_id in _json(run.path / run_folder.CANCELLED).get("jobs", [])

    return state_of(Known(_known(answer, job_id), record, answer.unreachable, cancelled))


def jobs(record: Mapping[str, Any]) -> list[str]:
    """Return the ids of all jobs in a submission.json: one, or those of a chain."""
    return [str(job) for job in record.get("jobs", [record["job_id"]])]


def is_other(record: Mapping[str, Any], job_id: str, comment: str, command: str) -> bool:
    """Return whether a job with an id of this submission.json is certainly not the submitted one."""
    # Each job of a chain has its own token. A manual start may use any script.
    known = record.get("tokens", []) if "jobs" in record else [record.get("token")]
    script = (record.get("command") or [""])[-1] if job_id in jobs(record) else ""
    return tokens.is_other(comment, command, list(filter(None, known)), script)


def last_job(path: Path) -> str:
    """Return the id of the job that last ran the script, or ''. After a manual start it is not the submitted one."""
    return str(_json(path / run_folder.EXIT).get("job", ""))


def exit_status(path: Path) -> int | None:
    """Return the exit status that the batch script of the last attempt recorded, or None before its end."""
    status = _json(path / run_folder.EXIT).get("exit_status")
    return status if isinstance(status, int) else None


def _chain(run: _Run, answer: SlurmReply) -> State:
    """Return the state of a chain: its recorded end, or the state of the job that runs, waits or was the last."""
    decided = _decided(run.path)
    known = {job: of_slurm(now) for job, now in answer.jobs.items() if job in run.jobs}
    open_ = [job for job in run.jobs if job in known and not known[job].over and known[job].source != "sacct"]
    active = sorted(open_, key=lambda job: known[job].name == "PENDING")  # a running job first
    if answer.unreachable and not decided:
        state = State("UNKNOWN", run.last or run.jobs[0], "slurm", answer.unreachable, None, NO_REPLY)
    elif decided or not active:
        job_id = run.last or run.jobs[-1]
        running = decided and job_id in open_  # its end is recorded, but it is still in the queue
        state = run.left._replace(job_id=job_id) if running else _of_job(run, job_id, answer)
    else:
        state = known[active[0]]
    number = run.jobs.index(state.job_id) + 1
    others = tuple(job for job in open_ if job != state.job_id)
    return state._replace(link=f"job {number} of a chain of {len(run.jobs)}", others=others)


def _decided(path: Path) -> bool:
    """Return whether no later job of the chain will continue: an attempt finished, or failed without a signal."""
    status = exit_status(path)
    stopped = status == 0 and (path / run_folder.STOPPED).exists()
    return status not in (None, run_folder.ENDED_EARLY) and not stopped


def of_array(job_id: str) -> list[State]:
    """Return the states of the tasks of an array ('4242') that Slurm still knows, or of a job that is no array."""
    answer = queue.query([JobQuery([job_id], job_id)])
    tasks = [of_slurm(now) for one, now in answer.jobs.items() if one.startswith(f"{job_id}_")]
    unknown = State("UNKNOWN", job_id, "slurm")
    return tasks or [state_of(Known(_known(answer, job_id), unknown, answer.unreachable))]


def foreign_job(job_id: str) -> queue.Job | None:
    """Return Slurm's record of a job without a run folder, or None if it has none or does not reply."""
    return queue.query([JobQuery([job_id], job_id)]).jobs.get(job_id) if shutil.which("squeue") else None


def submission(path: Path) -> dict[str, Any]:
    """Return submission.json. Raise RequestError that describes the folder's actual content if it is not usable."""
    try:
        document = safe_files.read_json(f"{path}/{run_folder.SUBMISSION}")
    except FileNotFoundError:
        if (path / run_folder.SCRIPT).exists():
            raise RequestError(_unsubmitted(path)) from None
        raise RequestError(f"{path} is not a run folder: it has no {run_folder.SUBMISSION}") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path / run_folder.SUBMISSION} cannot be read: {error}") from None
    if not isinstance(document, dict) or not {"job_id", "engine"} <= set(document):
        raise RequestError(f"{path / run_folder.SUBMISSION} has no job_id and engine: was it edited?")
    _submissions[str(path)] = document
    return document


def last_submission(path: Path) -> dict[str, Any]:
    """Return submission.json as this process last read it; read it if it has not yet.

    Raise RequestError if the file cannot be read.
    """
    return _submissions.get(str(path)) or submission(path)


def clusters(path: Path) -> str:
    """Return the run's cluster.clusters: the cluster of its jobs, or '' if that is SLURM_CONF's."""
    try:
        return str(last_submission(path).get("clusters", ""))
    except RequestError:
        return ""


def _unsubmitted(path: Path) -> str:
    """Return a message about a run folder whose submission was not confirmed (MaybeSubmitted)."""
    script, job = path.absolute() / run_folder.SCRIPT, last_job(path)
    if job:
        ended = exit_status(path)
        return (
            f"{path} has no {run_folder.SUBMISSION}, but job {job} started its script"
            + (f" and ended with exit status {ended}" if ended is not None else f"; see squeue --jobs={job}")
            + f"; its logs are in {path / run_folder.LOGS}"
        )
    return (
        f"{path} has a script but no {run_folder.SUBMISSION}: hpcinit was killed during the submission, or Slurm "
        "did not confirm the job. Look for the job: squeue --all --me --states=all --format='%i %T %o' | "
        f"grep -F {script} ; "
        "no output means that nothing was submitted"
    )


def _local(path: Path, job_id: str) -> State:
    from hpcinit.local import engine  # noqa: PLC0415 - imports psutil, which only runs without Slurm need

    left = engine.read_state(path)
    reason = "the local engine ended without a record: it was killed, or the disk is full" * (
        left.get("state") == "NODE_FAIL"
    )
    if host := engine.elsewhere(path):
        reason = f"as recorded on {host}: its processes are not visible here"
    return State(left.get("state", "UNKNOWN"), job_id, "local", reason, left.get("exit_status"), engine.STATE)


def _by_hand(path: Path, job_id: str) -> State:
    """Return the state after `bash job.sh`, without the engine. Only the script's own record exists."""
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
            "Slurm no longer knows the job, and it never started: was it canceled while it waited? A controller that "
            "is killed loses the jobs of its last 5 s. Submit it again: hpcinit resubmit "
            "(cluster.submit_confirm=true checks a second time)"
        )
        return State("UNKNOWN", job_id, "slurm", never)
    if not isinstance(status, int):
        lost = "Slurm no longer knows the job, and no exit status is recorded"
        return State("UNKNOWN", job_id, "slurm", lost, restart=restart)
    name = "COMPLETED" if status == 0 else "FAILED"
    return State(name, job_id, "slurm", "", status, run_folder.EXIT, restart=restart)


def _json(path: str | Path) -> dict[str, Any]:
    try:
        document = safe_files.read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
