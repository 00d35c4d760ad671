"""Reads several runs and sweeps with their states. It queries Slurm once per cluster, not once per run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.engine import SLURM, Engine, slurm_engine
from hpcinit.observe import find_runs, state
from hpcinit.slurm.queue import QueueQuery
from hpcinit.slurm.slurm_client import Unreachable


@dataclass(frozen=True)
class Run:
    """A run with its state.

    path: the run folder.
    now: the state, for a job or a chain of jobs.
    tasks: the tasks with their states, for a sweep.
    error: why the folder can't be read, if it is invalid.
    task: the task of a sweep, if this object describes a single task.
    """

    path: Path
    now: state.State | None = None
    tasks: Sequence[find_runs.Task] = ()
    error: RequestError | None = None
    task: find_runs.Task | None = None

    @property
    def name(self) -> str:
        return self.task.name if self.task else self.path.name

    @property
    def parts(self) -> list[tuple[Path, state.State]]:
        """Return the folder and the state of the run. For a sweep, return those of each submitted task."""
        if self.now:
            return [(self.path, self.now)]
        return [(task.path, task.state) for task in self.tasks if task.state.name != find_runs.NOT_SUBMITTED]

    @property
    def engine(self) -> Engine:
        """Return the engine (Slurm or the local engine) of the run's jobs. If no job exists, return Slurm."""
        return self.parts[0][1].engine if self.parts else SLURM

    @property
    def over(self) -> bool:
        return all(now.over for _, now in self.parts)

    @property
    def status(self) -> int:
        """Return the exit status of the run, for a command that waits for it. For a sweep, it is the highest one."""
        return max((now.status for _, now in self.parts), default=1)


def read(paths: Sequence[Path], queue: QueueQuery | None = None, newest: bool = False) -> list[Run]:
    """Return the runs in the folders `paths`, in the same order.

    queue: a squeue process that is already running and lists all of the user's jobs, or None.
    newest: whether a task that was submitted again is shown as its new run.
    """
    known = [_combinations(path) for path in paths]
    folders: list[Path] = []
    for path, tasks in zip(paths, known, strict=True):
        if isinstance(tasks, dict):
            folders += find_runs.task_folders(path, tasks, newest)
        elif tasks is None:
            folders.append(path)
    states = zip(folders, state.read_all(folders, queue), strict=True)
    return [_run(path, tasks, states) for path, tasks in zip(paths, known, strict=True)]


def _combinations(path: Path) -> dict[int, tuple[str, ...]] | RequestError | None:
    try:
        return find_runs.combinations(path) if find_runs.is_sweep(path) else None
    except RequestError as error:
        return error


def _run(
    path: Path,
    tasks: dict[int, tuple[str, ...]] | RequestError | None,
    states: Iterator[tuple[Path, state.State | RequestError]],
) -> Run:
    if isinstance(tasks, RequestError):
        return Run(path, error=tasks)
    if tasks is not None:
        return Run(path, tasks=find_runs.with_states(path, tasks, itertools.islice(states, len(tasks))))
    _, now = next(states)
    return Run(path, error=now) if isinstance(now, RequestError) else Run(path, now)


def each_task(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, with every sweep replaced by its tasks."""
    found: list[Run] = []
    for run in runs:
        found += [Run(task.path, task.state, task=task) for task in run.tasks] if run.tasks else [run]
    return found


def without_folder(runs_dir: Path, queue: QueueQuery) -> list[Run]:
    """Return the runs whose folder in `runs_dir` was deleted although a job is still in the queue."""
    try:
        jobs = queue.jobs()
    except Unreachable:  # the states of the other runs show that Slurm does not answer
        return []
    found: dict[str, Run] = {}
    there = set(os.listdir(runs_dir)) if runs_dir.is_dir() else set()  # noqa: PTH208 - names of a thousand folders
    resolve = cache(os.path.realpath)
    for job in jobs:
        folder, _, script = job.command.split(" ", 1)[0].rpartition("/")
        above, _, name = folder.rpartition("/")
        if name in there or name in found or job.over or not script.startswith("job") or not script.endswith(".sh"):
            continue
        if resolve(above) == resolve(str(runs_dir)):
            now = slurm_engine.of_slurm(job)._replace(job_id=job.base_id, folder_deleted=True)
            found[name] = Run(runs_dir / name, now)
    return list(found.values())
