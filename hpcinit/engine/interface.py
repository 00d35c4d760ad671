"""The interface of an engine, which starts jobs: Slurm (`slurm_engine.py`) or this machine alone (`local_engine.py`).

No other package depends on which engine is used. To add a scheduler, write a third module in this package, add it to
`__init__.py`, and write a program that starts ranks, as `local_step.py` does.

Two things still assume Slurm. The batch script uses the directives of sbatch. An engine with `has_queue` needs arrays,
dependencies and requeues like Slurm's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcinit.records.job_record import JobRecord
from hpcinit.slurm.queue import FINAL, KNOWN, QueueQuery

Submitted = tuple[str, Sequence[str]]  # a job id, and the command that submitted the job
NO_REPLY = "no reply"  # the value of State.source when the scheduler did not reply


@dataclass(frozen=True)
class Engine(ABC):
    """Starts the jobs of a cluster, finds their state, and cancels them.

    name: the value of cluster.engine.
    has_queue: whether jobs wait in a queue for the resources that they request. Only such jobs can depend on other
    jobs, be requeued or be part of an array. Without a queue, a job starts at once.
    other_machines: whether the ranks run on other machines, which share only some file systems with this one.
    uses_slurm: whether Slurm's commands and the options of sbatch and srun apply.
    script_command: the command with which a user starts the batch script again.
    cancel_command: the command that ends a job, given its id.
    """

    name: str
    has_queue: bool
    other_machines: bool
    uses_slurm: bool
    script_command: str
    cancel_command: str

    @abstractmethod
    def step_command(self, python: str) -> list[str]:
        """Return the command that starts the ranks inside a job, without its options. The options are those of srun.

        python: the interpreter on the batch script's host.
        """

    @abstractmethod
    def submit(self, path: Path, time_min: float, env: Mapping[str, str], sbatch: Callable[[], Submitted]) -> Submitted:
        """Start the job of the run folder `path` exactly once. Return its id and the command that started it.

        path: the run folder, which must be complete.
        time_min: the job's time limit in minutes.
        env: the job's environment.
        sbatch: a function that submits the job's script to Slurm.

        Raise SubmitError if there is no job, and MaybeSubmitted if there may be one.
        """

    @abstractmethod
    def states(self, records: Sequence[JobRecord], early: QueueQuery | None = None) -> list[State]:
        """Return the states of runs that belong to this engine, in the same order.

        early: a squeue query for all of the user's jobs, if it is already running, or None.
        """

    @abstractmethod
    def check_cancelable(self, path: Path, jobs: Sequence[State]) -> None:
        """Raise RequestError or Failure if the jobs of the run in `path` can't be canceled from this machine."""

    @abstractmethod
    def cancel(self, jobs: Mapping[Path, Sequence[str]]) -> None:
        """Cancel jobs, given the job ids for each run folder. Raise Failure if a job could not be canceled."""


class State(NamedTuple):  # a frozen dataclass takes five times as long to create, and a sweep may have a thousand jobs
    """The state of one job.

    name: Slurm's state (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ...), or UNKNOWN.
    reason: why the job waits or what ended it, from Slurm.
    exit_status: the exit status after the end, or None if it is unknown.
    source: which command or file reported the state.
    by_hand: whether the user started the script of the last attempt manually.
    link: 'job 2 of a chain of 5', or ''.
    others: other jobs of the chain that are still in the queue.
    start: when the job started, or Slurm's estimate, in this machine's time ('2026-11-21T14:02:00'), or ''.
    elapsed_s, left_s: seconds since the start, and seconds until the time limit, or None if unknown.
    restart: the number of the last attempt that the job recorded, or None before the first attempt.
    away: whether Slurm's controller did not reply.
    folder_deleted: whether the job is in the queue although its run folder does not exist.
    """

    name: str
    job_id: str
    engine: Engine
    reason: str = ""
    exit_status: int | None = None
    source: str = ""
    by_hand: bool = False
    link: str = ""
    others: tuple[str, ...] = ()
    start: str = ""
    elapsed_s: int | None = None
    left_s: int | None = None
    restart: int | None = None
    away: bool = False
    folder_deleted: bool = False

    @property
    def over(self) -> bool:
        return self.name in FINAL

    @property
    def status(self) -> int:
        """Return the exit status of a command that waited for the job. It is 0 only if the job succeeded."""
        return (self.exit_status or 0) if self.name == "COMPLETED" else self.exit_status or 1

    @property
    def requeued(self) -> bool:
        """Return whether the job was requeued and waits for its next attempt. Its nodes might not be free yet."""
        waits = self.name == "PENDING" or (self.name == "COMPLETING" and self.reason == "BeginTime")
        return waits and self.restart is not None

    @property
    def is_unknown_state(self) -> bool:
        """Return whether Slurm reported a state that this version of hpcinit does not know."""
        return self.name not in KNOWN

    @property
    def purged(self) -> bool:
        """Return True if Slurm replied that it does not know the job, and the job has not recorded its end."""
        return self.name == "UNKNOWN" and self.source == ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for JSON output. The field `name` is called `state` there."""
        fields = self._asdict()
        return {"state": fields.pop("name"), **fields, "engine": self.engine.name}
