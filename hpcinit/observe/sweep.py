"""A sweep: the state of each of its tasks from one question to Slurm, whatever their number."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.facts import runfolder
from hpcinit.facts.errors import RequestError
from hpcinit.observe import state

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
    return os.path.isfile(f"{path}/{runfolder.SWEEP}")  # noqa: PTH113 - of a thousand runs, as in state._json


def combinations(path: Path) -> dict[int, str]:
    """What each task is, by its number. Raises RequestError."""
    try:
        document = json.loads((path / runfolder.SWEEP).read_text())
        return {int(number): str(text) for number, text in document["tasks"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path / runfolder.SWEEP} cannot be read: {error}; was it edited?") from None


def read(path: Path) -> list[Task]:
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


def of_job(word: str, path: Path) -> Path | None:
    """The task that is job `word` ('4242_17'), or the sweep itself if one of its arrays is ('4242')."""
    jobs = [str(job["job_id"]) for job in state.submission(path).get("sweep", [])]
    if word in jobs and (path / runfolder.SWEEP).is_file():
        alone = [path / str(number) for number in combinations(path) if _job_id(path / str(number)) == word]
        return alone[0] if alone else path
    if word.partition("_")[0] not in jobs:
        return None
    tasks = (path / str(number) for number in combinations(path))
    return next((task for task in tasks if _job_id(task) == word), None)


def open_jobs(tasks: Sequence[Task]) -> list[str]:
    """The jobs that are not over yet, as scancel takes them."""
    return sorted({task.state.job_id.partition("_")[0] for task in tasks if _is_open(task)})


def failed(path: Path) -> list[int]:
    """The tasks that have ended in another way than well, for a second attempt."""
    return [task.number for task in read(path) if task.state.over and task.status]


def counts(tasks: Sequence[Task]) -> str:
    """'3 COMPLETED, 1 FAILED, 996 PENDING'."""
    return ", ".join(f"{number} {name}" for name, number in Counter(task.state.name for task in tasks).most_common())


def _is_open(task: Task) -> bool:
    return not (task.state.over or task.state.forgotten) and task.state.name != NOT_SUBMITTED


def _job_id(task: Path) -> str:
    try:
        return str(state.submission(task)["job_id"])
    except RequestError:
        return ""
