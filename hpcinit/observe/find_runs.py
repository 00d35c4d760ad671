"""Find runs by folder, by the last part of their name or by job id; and the tasks of a sweep."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcinit.base.errors import RequestError
from hpcinit.observe import state
from hpcinit.records import run_folder

if TYPE_CHECKING:
    import argparse

# A sweep: the state of each of its tasks from one question to Slurm, whatever their number.

NOT_SUBMITTED = "NOT_SUBMITTED"


@dataclass(frozen=True)
class Task:
    """One combination. state: of name NOT_SUBMITTED where sbatch refused the job that it was to be in."""

    number: int
    combination: str
    path: Path
    state: state.State

    @property
    def status(self) -> int:
        """What a program that waits should end with for it."""
        known = self.state.exit_status
        return (known or 1) if self.state.name != "COMPLETED" else known or 0


def is_sweep(path: Path) -> bool:
    return os.path.isfile(f"{path}/{run_folder.SWEEP}")  # noqa: PTH113 - of a thousand runs, as in state._json


def combinations(path: Path) -> dict[int, str]:
    """What each task is, by its number. Raises RequestError."""
    try:
        document = json.loads((path / run_folder.SWEEP).read_text())
        return {int(number): str(text) for number, text in document["tasks"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path / run_folder.SWEEP} cannot be read: {error}; was it edited?") from None


def read_sweep(path: Path) -> list[Task]:
    """All tasks with their states."""
    known = combinations(path)
    folders = [path / str(number) for number in known]
    return with_states(known, zip(folders, state.read_all(folders), strict=True))


def with_states(known: Mapping[int, str], states: Iterable[tuple[Path, state.State | RequestError]]) -> list[Task]:
    """known: combinations(). states: of the tasks' folders, in that order; an error of one that has no job."""
    return [
        Task(number, text, path, _submitted(now))
        for (number, text), (path, now) in zip(known.items(), states, strict=True)
    ]


def _submitted(now: state.State | RequestError) -> state.State:
    return state.State(NOT_SUBMITTED, "-", "slurm") if isinstance(now, RequestError) else now


def task_of_job(word: str, path: Path) -> Path | None:
    """The task that is job `word` ('4242_17'), or the sweep itself if one of its arrays is ('4242')."""
    jobs = [str(job["job_id"]) for job in state.submission(path).get("sweep", [])]
    if word in jobs and (path / run_folder.SWEEP).is_file():
        alone = [path / str(number) for number in combinations(path) if _job_id(path / str(number)) == word]
        return alone[0] if alone else path
    if word.partition("_")[0] not in jobs:
        return None
    tasks = (path / str(number) for number in combinations(path))
    return next((task for task in tasks if _job_id(task) == word), None)


def open_jobs(tasks: Sequence[Task]) -> list[str]:
    """The jobs that are not over yet, as scancel takes them."""
    return sorted({task.state.job_id.partition("_")[0] for task in tasks if _is_open(task)})


def failed_tasks(path: Path) -> list[int]:
    """The tasks that have ended in another way than well, for a second attempt."""
    return [task.number for task in read_sweep(path) if task.state.over and task.status]


def count_states(tasks: Sequence[Task]) -> str:
    """'3 COMPLETED, 1 FAILED, 996 PENDING'."""
    return ", ".join(f"{number} {name}" for name, number in Counter(task.state.name for task in tasks).most_common())


def _is_open(task: Task) -> bool:
    return not (task.state.over or task.state.forgotten) and task.state.name != NOT_SUBMITTED


def _job_id(task: Path) -> str:
    try:
        return str(state.submission(task)["job_id"])
    except RequestError:
        return ""


def all_runs(runs_dir: Path) -> list[Path]:
    """All submitted runs below `runs_dir`, the last submitted last."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(runs_dir):
            with contextlib.suppress(OSError):
                found.append((os.stat(f"{entry.path}/{run_folder.SUBMISSION}").st_mtime_ns, entry.path))  # noqa: PTH116
    return [Path(path) for _, path in sorted(found)]


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Give a command that means runs its --runs-dir."""
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the runs are; default: runs")


def find_run(word: str, runs_dir: Path = Path("runs")) -> Path:
    """The run folder that `word` means. Raises RequestError with what there is."""
    for path in (Path(word), runs_dir / word) if word else ():
        # A task of a sweep has its script with the others.
        if any((path / name).is_file() for name in (run_folder.SCRIPT, run_folder.SPEC, run_folder.SWEEP)):
            return path
    known = all_runs(runs_dir)
    for path in known if word else ():
        with contextlib.suppress(RequestError):
            if word in (*state.jobs(state.submission(path)), state.last_job(path)):
                return task_of_job(word, path) or path
            if task := task_of_job(word, path):
                return task
    last = ", ".join(path.name for path in known[-5:]) or "none"
    what = f"no run {word!r}: neither a run folder nor a job id" if word else "which run? Name one, or its job id"
    raise RequestError(f"{what}; the last in {runs_dir.absolute()}: {last}")


def means_all_runs(words: Sequence[str]) -> bool:
    return list(words) in ([], ["all"])


def matching_runs(words: Sequence[str], runs_dir: Path) -> list[Path]:
    """The run folders that are meant: all of them by no word or 'all'. Raises RequestError where there is none."""
    paths = all_runs(runs_dir) if means_all_runs(words) else [find_run(word, runs_dir) for word in words]
    if not paths:
        raise RequestError(f"no runs in {runs_dir.absolute()}; --runs-dir names another folder")
    return paths
