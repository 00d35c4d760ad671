"""Several runs and sweeps with their states, from one question to Slurm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.observe import find_runs, state


@dataclass(frozen=True)
class Run:
    """One of three: now, of a job or a chain. tasks, of a sweep. error, of a folder that is neither."""

    path: Path
    now: state.State | None = None
    tasks: Sequence[find_runs.Task] = ()
    error: RequestError | None = None

    @property
    def parts(self) -> list[tuple[Path, state.State]]:
        """The run folders in it with their states: a sweep has one for each task."""
        if self.now:
            return [(self.path, self.now)]
        return [(task.path, task.state) for task in self.tasks if task.state.name != find_runs.NOT_SUBMITTED]

    @property
    def over(self) -> bool:
        return all(now.over for _, now in self.parts)

    @property
    def status(self) -> int:
        """What a program that waits for it should end with; of a sweep the highest of its tasks."""
        return max((exit_status(now) for _, now in self.parts), default=1)


def exit_status(now: state.State) -> int:
    """What a program that waits for a run should end with: 0 only for one that has ended well."""
    known = now.exit_status
    return (known or 0) if now.name == "COMPLETED" else known or 1


def read(paths: Sequence[Path]) -> list[Run]:
    """In the order of `paths`."""
    known = [_combinations(path) for path in paths]
    folders: list[Path] = []
    for path, tasks in zip(paths, known, strict=True):
        if isinstance(tasks, dict):
            folders += [path / str(number) for number in tasks]
        elif tasks is None:
            folders.append(path)
    states = zip(folders, state.read_all(folders), strict=True)
    return [_run(path, tasks, states) for path, tasks in zip(paths, known, strict=True)]


def _combinations(path: Path) -> dict[int, str] | RequestError | None:
    try:
        return find_runs.combinations(path) if find_runs.is_sweep(path) else None
    except RequestError as error:
        return error


def _run(
    path: Path,
    tasks: dict[int, str] | RequestError | None,
    states: Iterator[tuple[Path, state.State | RequestError]],
) -> Run:
    if isinstance(tasks, RequestError):
        return Run(path, error=tasks)
    if tasks is not None:
        return Run(path, tasks=find_runs.with_states(tasks, itertools.islice(states, len(tasks))))
    _, now = next(states)
    return Run(path, error=now) if isinstance(now, RequestError) else Run(path, now)
