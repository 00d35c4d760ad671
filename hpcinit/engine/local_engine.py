"""Runs jobs on this machine without Slurm (`cluster=local`). psutil is imported only when such a job needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.engine.interface import Engine, State, Submitted
from hpcinit.records import run_folder
from hpcinit.records.job_record import JobRecord
from hpcinit.slurm.queue import QueueQuery


@dataclass(frozen=True)
class LocalEngine(Engine):
    def step_command(self, python: str) -> list[str]:
        return [python, "-m", "hpcinit.engine.local_step"]

    def submit(self, path: Path, time_min: float, env: Mapping[str, str], sbatch: Callable[[], Submitted]) -> Submitted:
        from hpcinit.engine import local_job  # noqa: PLC0415

        return local_job.start(path, time_min, env)

    def states(self, records: Sequence[JobRecord], early: QueueQuery | None = None) -> list[State]:
        return [(_by_hand if one.job_id != one.submitted else _state)(one) for one in records]

    def check_cancelable(self, path: Path, jobs: Sequence[State]) -> None:
        from hpcinit.engine import local_job  # noqa: PLC0415

        if by_hand := next((job for job in jobs if job.by_hand and not job.over), None):
            raise RequestError(
                f"{path.name} was started manually, as process {by_hand.job_id}: stop it in its terminal with Ctrl-C"
            )
        if host := local_job.elsewhere(path):
            raise RequestError(
                f"{path.name} runs on {host}, and its processes are not visible here. On {host}, type: hpcinit cancel "
                f"{path.absolute()}"
            )

    def cancel(self, jobs: Mapping[Path, Sequence[str]]) -> None:
        from hpcinit.engine import local_job  # noqa: PLC0415

        for path, its in jobs.items():
            if its:
                local_job.cancel(path)


LOCAL = LocalEngine(
    "local", has_queue=False, other_machines=False, uses_slurm=False, script_command="bash", cancel_command="kill"
)


def _state(record: JobRecord) -> State:
    from hpcinit.engine import local_job  # noqa: PLC0415

    left = local_job.read_state(record.path)
    name, status = left.get("state", "UNKNOWN"), left.get("exit_status")
    reason = "the local engine ended without a record: it was killed, or the disk is full" * (name == "NODE_FAIL")
    if host := local_job.elsewhere(record.path):
        reason = f"as recorded on {host}: its processes are not visible here"
    return State(name, record.job_id, LOCAL, reason, status, local_job.STATE, restart=record.restart)


def _by_hand(record: JobRecord) -> State:
    """Return the state of a job that the user started with `bash job.sh`, from the record that the script wrote."""
    from hpcinit.engine import local_job  # noqa: PLC0415

    status = record.exit_status
    if status is not None:
        name = "COMPLETED" if status == 0 else "FAILED"
    else:
        alive = local_job.is_alive(record.attempt.get("pid", 0), record.attempt.get("began", 0))
        name = "RUNNING" if alive else "NODE_FAIL"
    return State(name, record.job_id, LOCAL, "", status, run_folder.EXIT, by_hand=True, restart=record.restart)
