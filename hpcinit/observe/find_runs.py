"""Finds runs by their folder, their name or a job id, and finds the tasks of a sweep."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcinit.base import safe_files
from hpcinit.base.errors import RequestError
from hpcinit.engine import SLURM
from hpcinit.observe import resubmitted, state
from hpcinit.records import job_record, run_folder

if TYPE_CHECKING:
    import argparse

NOT_SUBMITTED = "NOT_SUBMITTED"


@dataclass(frozen=True)
class Task:
    """One task of a sweep. Its state is NOT_SUBMITTED if sbatch refused its job.

    sweep: the folder of the sweep.
    given: the overrides in which the tasks differ, such as 'lr=0.1'.
    path: the run folder. If the task was submitted again, it is the folder of the new run.
    """

    number: int
    sweep: Path
    given: tuple[str, ...]
    path: Path
    state: state.State

    @property
    def name(self) -> str:
        """Return the name that commands accept, such as 'sweep-0001/3'."""
        return f"{self.sweep.name}/{self.number}"

    @property
    def combination(self) -> str:
        return " ".join(self.given)

    @property
    def resubmitted(self) -> str:
        """Return the name of the run that replaced this task, such as 'train-0007', or '' if no run did."""
        return "" if self.path == self.sweep / str(self.number) else name_of(self.path)


def is_sweep(path: Path) -> bool:
    return os.path.isfile(f"{path}/{run_folder.SWEEP}")  # noqa: PTH113 - fast: a sweep has a thousand tasks


def name_of(path: Path) -> str:
    """Return the name that commands accept for a run, such as 'train-0001', or 'train-0001/3' for a sweep's task."""
    return f"{sweep.name}/{path.name}" if (sweep := resubmitted.sweep_of(path)) else path.name


def combinations(path: Path) -> dict[int, tuple[str, ...]]:
    """Return the overrides in which the tasks of a sweep differ, by task number.

    path: the folder of the sweep.

    Raise RequestError if the file with the tasks can't be read.
    """
    try:
        document = safe_files.read_json(path / run_folder.SWEEP)
        return {int(number): tuple(map(str, words)) for number, words in document["tasks"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path / run_folder.SWEEP} cannot be read: {error}; was it edited?") from None


def read_sweep(path: Path) -> list[Task]:
    """Return all tasks of a sweep with their latest states. Slurm is queried once."""
    known = combinations(path)
    folders = task_folders(path, known)
    return with_states(path, known, zip(folders, state.read_all(folders), strict=True))


def task_folders(path: Path, numbers: Iterable[int], newest: bool = True) -> list[Path]:
    """Return the run folders of the tasks of a sweep.

    numbers: the tasks.
    newest: for a task that was submitted again, whether to return the folder of the new run.
    """
    again = resubmitted.of_sweep(path) if newest else {}
    return [again.get(str(number), path / str(number)) for number in numbers]


def with_states(
    sweep: Path, known: Mapping[int, tuple[str, ...]], states: Iterable[tuple[Path, state.State | RequestError]]
) -> list[Task]:
    """Return the tasks of a sweep with their states.

    known: the overrides of each task, from combinations().
    states: the folder of each task with its state, or with a RequestError if it has no job.
    """
    return [
        Task(number, sweep, words, path, _submitted(now))
        for (number, words), (path, now) in zip(known.items(), states, strict=True)
    ]


def _submitted(now: state.State | RequestError) -> state.State:
    return state.State(NOT_SUBMITTED, "-", SLURM) if isinstance(now, RequestError) else now


def task_of_job(word: str, path: Path) -> Path | None:
    """Return the folder of the task with the job id `word` ('4242_17').

    If `word` is the id of one of the sweep's arrays ('4242'), return the sweep's folder. Return None for any other job.
    """
    jobs = [str(job["job_id"]) for job in job_record.submission(path).get("sweep", [])]
    if word in jobs and (path / run_folder.SWEEP).is_file():
        alone = [path / str(number) for number in combinations(path) if _job_id(path / str(number)) == word]
        return alone[0] if alone else path
    if word.partition("_")[0] not in jobs:
        return None
    tasks = (path / str(number) for number in combinations(path))
    return next((task for task in tasks if _job_id(task) == word), None)


def open_jobs(tasks: Sequence[Task]) -> list[str]:
    """Return the ids of the tasks' jobs that are not over, as scancel expects them."""
    return sorted({task.state.job_id.partition("_")[0] for task in tasks if _is_open(task)})


def failed_tasks(path: Path) -> list[Task]:
    """Return the tasks of the sweep in `path` that have ended without success."""
    return [task for task in read_sweep(path) if task.state.over and task.state.status]


def count_states(tasks: Sequence[Task]) -> str:
    """Return how many tasks have each state, such as '3 COMPLETED, 1 FAILED, 996 PENDING'."""
    return ", ".join(f"{number} {name}" for name, number in Counter(task.state.name for task in tasks).most_common())


def _is_open(task: Task) -> bool:
    return not (task.state.over or task.state.purged) and task.state.name != NOT_SUBMITTED


def _job_id(task: Path) -> str:
    try:
        return str(job_record.submission(task)["job_id"])
    except RequestError:
        return ""


def all_runs(runs_dir: Path) -> list[Path]:
    """Return the submitted runs in `runs_dir`, oldest first.

    Only runs of this user and of the folder's owner are included.
    """
    found = []
    with contextlib.suppress(OSError):
        owners = {os.geteuid(), os.stat(runs_dir).st_uid}  # noqa: PTH116
        for entry in os.scandir(runs_dir):
            if entry.name.startswith("."):  # for example a run that `hpcinit clean` is removing
                continue
            with contextlib.suppress(OSError):
                about = os.lstat(f"{entry.path}/{run_folder.SUBMISSION}")
                if about.st_uid in owners and stat.S_ISREG(about.st_mode):
                    found.append((about.st_mtime_ns, entry.path))
    return [Path(path) for _, path in sorted(found)]


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option --runs-dir to the options of a command."""
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="folder that contains the runs; default: runs"
    )


def find_run(word: str, runs_dir: Path = Path("runs")) -> Path:
    """Return the folder of the run with the path, name or job id `word`. If several runs match, return the latest.

    If there is no such run, raise a RequestError that lists the latest runs.
    """
    for path in (Path(word), runs_dir / word) if word else ():
        # A task of a sweep has no script: the tasks share the one in the sweep's folder.
        if any((path / name).is_file() for name in (run_folder.SCRIPT, run_folder.SPEC, run_folder.SWEEP)):
            return path
    known = all_runs(runs_dir)
    matches = _of_job(word, known[::-1]) if word else iter(())
    if found := next(matches, None):
        mine = _queue(found)
        if other := next((path for path in matches if _queue(path) != mine), None):
            raise RequestError(
                f"two runs on different clusters or engines have the job id {word}: use the name of the run instead, "
                f"{found.name} or {other.name}"
            )
        return found
    last = ", ".join(path.name for path in known[-5:]) or "none"
    if word.isdigit() and (job := state.foreign_job(word)):
        raise RequestError(
            f"job {word} is not a run of hpcinit in {runs_dir.absolute()}: Slurm reports it as {job.state}"
            + (f", with the script {job.command}" if job.command else "")
            + f"; see squeue --jobs={word} or sacct. If hpcinit submitted it from another folder, add --runs-dir"
        )
    what = (
        f"no run {word!r}: no run folder or job has this name" if word else "no run given, expected its name or job id"
    )
    raise RequestError(f"{what}; the latest in {runs_dir.absolute()}: {last}")


def _queue(path: Path) -> tuple[str, str]:
    """Return the engine and the cluster of a run, because job ids are unique only within one engine and cluster."""
    return job_record.last_submission(path)["engine"], job_record.clusters(path)


def _of_job(word: str, known: Sequence[Path]) -> Iterator[Path]:
    """Yield the runs, and the tasks of sweeps, that have a job with the id `word`."""
    for path in known:
        with contextlib.suppress(RequestError):
            if word in (*job_record.jobs(job_record.submission(path)), job_record.last_job(path)):
                yield task_of_job(word, path) or path
            elif task := task_of_job(word, path):
                yield task


def means_all_runs(names: Sequence[str]) -> bool:
    return list(names) in ([], ["all"])


def matching_runs(names: Sequence[str], runs_dir: Path) -> list[Path]:
    """Return the folders of the named runs. If `names` is empty or ['all'], return the folders of all runs.

    Raise RequestError if a named run does not exist, or if there are no runs.
    """
    paths = all_runs(runs_dir) if means_all_runs(names) else [find_run(name, runs_dir) for name in names]
    if not paths:
        raise RequestError(f"no runs in {runs_dir.absolute()}; name another folder with --runs-dir")
    return paths
