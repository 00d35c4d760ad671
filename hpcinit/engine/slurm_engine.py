"""Runs jobs on Slurm: submits and cancels them, and finds their state.

The state of a job may be in several places: squeue, sacct, scontrol and the run folder. The functions in SOURCES are
tried in order, and the first one that returns a state is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files
from hpcinit.base.errors import Failure
from hpcinit.engine.interface import NO_REPLY, Engine, State, Submitted
from hpcinit.records import job_record, run_folder
from hpcinit.records.job_record import JobRecord
from hpcinit.slurm import queue, slurm_client, tokens
from hpcinit.slurm.queue import Job, JobQuery, QueueQuery, SlurmReply


@dataclass(frozen=True)
class SlurmEngine(Engine):
    def step_command(self, python: str) -> list[str]:
        return ["srun"]

    def submit(self, path: Path, time_min: float, env: Mapping[str, str], sbatch: Callable[[], Submitted]) -> Submitted:
        return sbatch()

    def states(self, records: Sequence[JobRecord], early: QueueQuery | None = None) -> list[State]:
        wanted: dict[str, list[JobQuery]] = {"": []}  # by cluster, because two clusters may use the same job id
        for record in records:
            wanted.setdefault(record.clusters, []).append(_wanted(record))
        answers = {name: _answer(name, queries, early) for name, queries in wanted.items()}
        return [_now(record, answers[record.clusters]) for record in records]

    def check_cancelable(self, path: Path, jobs: Sequence[State]) -> None:
        # A controller that lost its state may reuse the id for another job. Only its reply shows this.
        if silent := next((job for job in jobs if job.away and not job.over), None):
            with slurm_client.on_cluster(job_record.clusters(path)):
                scancel = " ".join(slurm_client.addressed([self.cancel_command, silent.job_id]))
            raise Failure(
                f"{path.name} was not canceled: Slurm does not answer ({silent.reason}), so hpcinit cannot check that "
                f"job {silent.job_id} still belongs to this run. Try again when `squeue` answers, or type: {scancel}"
            )

    def cancel(self, jobs: Mapping[Path, Sequence[str]]) -> None:
        clusters: dict[str, list[str]] = {}
        for path, its in jobs.items():
            clusters.setdefault(job_record.clusters(path), []).extend(its)
        for name, ids in clusters.items():
            with slurm_client.on_cluster(name):
                _scancel(ids)


SLURM = SlurmEngine(
    "slurm", has_queue=True, other_machines=True, uses_slurm=True, script_command="sbatch", cancel_command="scancel"
)


def _scancel(jobs: Sequence[str]) -> None:
    if not jobs:
        return
    try:
        done = slurm_client.run(["scancel", *jobs])
    except slurm_client.NotStarted as error:
        raise Failure(f"{error}: run this on the machine where the job was submitted") from None
    except slurm_client.TimedOut as error:
        raise Failure(f"{error}; try again when `squeue` answers") from None
    if done.status != 0:
        raise Failure(f"{' '.join(done.command)}: {done.stderr.strip()}")


def of_slurm(job: Job) -> State:
    """Return the State of a job that Slurm has reported."""
    return State(
        job.state, job.job_id, SLURM, job.reason, job.exit_status, job.source,
        start=job.start, elapsed_s=job.elapsed_s, left_s=job.left_s,
    )  # fmt: skip


@dataclass(frozen=True)
class Known:
    """Information about one Slurm job.

    slurm: the state from squeue, sacct or scontrol, or None if Slurm does not know the job.
    record: the state from exit.json in the run folder.
    unreachable: why the controller did not reply, or ''.
    cancelled: returns whether `hpcinit cancel` recorded this job in the run folder.
    """

    slurm: State | None
    record: State
    unreachable: str = ""
    cancelled: Callable[[], bool] = lambda: False

    @property
    def ended_early(self) -> bool:
        """Return whether a signal ended the batch script. In this case, Slurm might have requeued the job."""
        return self.record.exit_status == run_folder.ENDED_EARLY

    @property
    def outlived(self) -> bool:
        """Return whether the batch script has ended, but Slurm reports a state that hpcinit does not know."""
        return (
            self.slurm is not None and self.slurm.is_unknown_state and self.slurm.source != "sacct" and self.record.over
        )


def state_of(known: Known) -> State:
    """Return the state of the job, from the first function in SOURCES that returns one."""
    return next(state for source in SOURCES if (state := source(known)) is not None)


def _ended(known: Known) -> State | None:
    """Return the job's state if Slurm reports that the job has ended, otherwise None.

    The exit status is from the run folder, because Slurm's record may lack it. If Slurm reports a
    requeued job as PREEMPTED, the state is also from the run folder, because Slurm 24.11 may never update it.
    """
    now, record = known.slurm, known.record
    if now is None or not now.over or not record.over:
        return now if now is not None and now.over else None
    again = now.name == "PREEMPTED" and record.restart and not known.ended_early
    return now._replace(name=record.name if again else now.name, exit_status=record.exit_status)


def _in_queue(known: Known) -> State | None:
    """Return the job's state if the controller reports that the job is waiting or running, otherwise None."""
    return known.slurm if known.slurm and known.slurm.source != "sacct" and not known.outlived else None


def _cancelled(known: Known) -> State | None:
    """Return CANCELLED if `hpcinit cancel` canceled the job and Slurm has no record of its end. Otherwise return None.

    Without accounting, Slurm keeps no record. `hpcinit cancel` writes one to the run folder.
    """
    lost = known.ended_early or not known.record.over
    if (known.unreachable and not known.outlived) or not lost or not known.cancelled():
        return None
    return known.record._replace(name="CANCELLED", reason="", source=run_folder.CANCELLED)


def _recorded(known: Known) -> State | None:
    """Return the final state that the batch script recorded, or None if it recorded none.

    Also return None if a signal ended the script and the controller is unreachable. Slurm might have requeued the job.
    """
    if not known.record.over or (known.unreachable and known.ended_early and not known.outlived):
        return None
    reason = f"Slurm reports {known.slurm.name}" if known.slurm and known.outlived else known.unreachable
    return known.record._replace(reason=reason)


def _accounted(known: Known) -> State | None:
    """Return the state of a job that only sacct knows, otherwise None.

    If the controller replied that it does not know the job, the state is UNKNOWN. If it did not reply, the state is
    sacct's.
    """
    if known.slurm is None:
        return None
    if known.unreachable:
        return known.slurm._replace(reason=f"from sacct; {known.unreachable}")
    reason = f"sacct reports {known.slurm.name}, but the controller does not know the job"
    return State("UNKNOWN", known.record.job_id, SLURM, reason)


def _unreachable(known: Known) -> State | None:
    if not known.unreachable:
        return None
    return State("UNKNOWN", known.record.job_id, SLURM, known.unreachable, None, NO_REPLY)


def _purged(known: Known) -> State:
    """Return the state in the run folder, for a job that Slurm does not know and that has not recorded its end."""
    return known.record


SOURCES: tuple[Callable[[Known], State | None], ...] = (
    _ended,
    _in_queue,
    _cancelled,
    _recorded,
    _accounted,
    _unreachable,
    _purged,
)


# The state of a run, which may be a chain of jobs.


def _wanted(record: JobRecord) -> JobQuery:
    if record.is_chain:
        return JobQuery(record.jobs, record.last or record.jobs[-1], record.exit_status is not None)
    return JobQuery([record.job_id], record.job_id, record.exit_status is not None)


def _answer(name: str, queries: Sequence[JobQuery], early: queue.QueueQuery | None) -> SlurmReply:
    """Return what Slurm replies about the jobs on the cluster `name`.

    name: the cluster, or '' for the one in SLURM_CONF.
    early: a running squeue command for the cluster in SLURM_CONF, or None.
    """
    with slurm_client.on_cluster(name):
        return queue.query(queries, None if name else early)


def _now(record: JobRecord, answer: SlurmReply) -> State:
    ids = {*record.jobs, record.job_id}
    jobs = [job for one in ids if (job := answer.jobs.get(one))]
    own = [job for job in jobs if not is_other(record.submission, job.job_id, job.comment, job.command)]
    answer = replace(answer, jobs={job.job_id: job for job in own})
    now = answer.jobs.get(record.job_id)
    if now is not None and now.over and record.exit_status is None:
        # The script may have ended between reading the folder and querying Slurm.
        again = replace(record, attempt=safe_files.json_or_empty(record.path / run_folder.EXIT))
        record = again if again.last == now.job_id else record
    state = _state(record, answer)
    is_its_attempt = record.last == state.job_id and record.restart is not None
    if not is_its_attempt and not answer.unreachable:
        return state
    return state._replace(restart=record.restart if is_its_attempt else None, away=bool(answer.unreachable))


def is_other(submission: Mapping[str, Any], job_id: str, comment: str, command: str) -> bool:
    """Return whether a job is certainly not the one that was submitted.

    submission: the content of the run's submission.json.
    job_id, comment, command: what Slurm reports about the job.
    """
    # Each job of a chain has its own token. A manual start may use any script.
    known = submission.get("tokens", []) if "jobs" in submission else [submission.get("token")]
    script = (submission.get("command") or [""])[-1] if job_id in job_record.jobs(submission) else ""
    return tokens.is_other(comment, command, list(filter(None, known)), script)


def _state(record: JobRecord, answer: SlurmReply) -> State:
    if record.is_chain:
        return _chain(record, answer)
    state = _of_job(record, record.job_id, answer)
    if record.job_id == record.submitted:
        return state
    # Inside an allocation (salloc), the script ends before its job does.
    ended = _end(record, record.job_id)
    return (ended if ended.over and state.name == "RUNNING" else state)._replace(by_hand=True)


def _of_job(record: JobRecord, job_id: str, answer: SlurmReply) -> State:
    def cancelled() -> bool:
        return job_id in safe_files.json_or_empty(record.path / run_folder.CANCELLED).get("jobs", [])

    job = answer.jobs.get(job_id)
    return state_of(Known(of_slurm(job) if job else None, _end(record, job_id), answer.unreachable, cancelled))


def _end(record: JobRecord, job_id: str) -> State:
    """Return the state of the job's last attempt, as recorded in the run folder.

    Return UNKNOWN if no exit status is recorded.
    """
    if not record.attempt:
        never = (
            "Slurm no longer knows the job, and the job never started: it was canceled while it waited, or the "
            "controller was killed within 5 s of the submission and lost it. Submit it again: hpcinit resubmit. "
            "cluster.submit_confirm=true detects such a loss"
        )
        return State("UNKNOWN", job_id, SLURM, never)
    if record.exit_status is None:
        lost = "Slurm no longer knows the job, and no exit status is recorded"
        return State("UNKNOWN", job_id, SLURM, lost, restart=record.restart)
    name = "COMPLETED" if record.exit_status == 0 else "FAILED"
    return State(name, job_id, SLURM, "", record.exit_status, run_folder.EXIT, restart=record.restart)


def _chain(record: JobRecord, answer: SlurmReply) -> State:
    """Return the state of a chain of jobs: its recorded end, or else the state of one of its jobs.

    That job is the one that is running, or else one that is waiting, or else the last job.
    """
    status = job_record.exit_status(record.path)
    stopped = status == 0 and (record.path / run_folder.STOPPED).exists()
    # No later job of the chain continues if an attempt finished the program, or failed without a signal.
    decided = status not in (None, run_folder.ENDED_EARLY) and not stopped
    known = {job: of_slurm(now) for job, now in answer.jobs.items() if job in record.jobs}
    open_ = [job for job in record.jobs if job in known and not known[job].over and known[job].source != "sacct"]
    active = sorted(open_, key=lambda job: known[job].name == "PENDING")  # a running job first
    if answer.unreachable and not decided:
        state = State("UNKNOWN", record.last or record.jobs[0], SLURM, answer.unreachable, None, NO_REPLY)
    elif decided or not active:
        job_id = record.last or record.jobs[-1]
        running = decided and job_id in open_  # the job has recorded its end, but is still in the queue
        state = _end(record, job_id) if running else _of_job(record, job_id, answer)
    else:
        state = known[active[0]]
    number = record.jobs.index(state.job_id) + 1
    others = tuple(job for job in open_ if job != state.job_id)
    return state._replace(link=f"job {number} of a chain of {len(record.jobs)}", others=others)


def of_array(job_id: str) -> list[State]:
    """Return the state of each task of an array that Slurm still knows. If the job is not an array, return its state.

    job_id: the id without a task number, such as '4242'.
    """
    answer = queue.query([JobQuery([job_id], job_id)])
    tasks = [of_slurm(now) for one, now in answer.jobs.items() if one.startswith(f"{job_id}_")]
    job = answer.jobs.get(job_id)
    known = Known(of_slurm(job) if job else None, State("UNKNOWN", job_id, SLURM), answer.unreachable)
    return tasks or [state_of(known)]
