"""The jobs that a sweep on Slurm becomes: arrays of combinations that ask for the same, plain jobs of those alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.config.compose import Request
from hpcinit.facts import runfolder
from hpcinit.facts.ranges import ranges
from hpcinit.submission import array, for_job, script


@dataclass(frozen=True)
class Job:
    """One call of sbatch. file: its script's, in the sweep's folder. text: the script. size: of a block of tasks.

    env_names: variables that each task reads from a file of its own.
    """

    requests: Sequence[Request]
    file: str
    text: str
    size: int
    env_names: set[str]

    @property
    def numbers(self) -> list[int]:
        return [request.number for request in self.requests]

    @property
    def is_array(self) -> bool:
        return len(self.requests) > 1

    @property
    def about(self) -> str:
        if not self.is_array:
            return self.requests[0].combination
        first, last = self.requests[0].combination, self.requests[-1].combination
        return f"an array of {len(self.requests)} tasks, {ranges(self.numbers)}: {first} to {last}"

    def id_of(self, number: int, job_id: str) -> str:
        """'4242_17', as Slurm calls the task with index 17."""
        return f"{job_id}_{number % self.size}" if self.is_array else job_id


def of(requests: Sequence[Request], path: Path) -> list[Job]:
    """The jobs of the sweep in `path`, in the order of their first tasks."""
    alike: dict[object, list[Request]] = {}
    for request in requests:
        config = request.config
        size = array.block(config.cluster.max_array_size)
        own = (repr(config.secrets), repr(config.secret_names), size, request.number // size)
        alike.setdefault((array.shape(config, path, for_job.workdir_of(config)), *own), []).append(request)
    jobs = []
    names = itertools.chain([runfolder.SCRIPT], (f"job-{at}.sh" for at in itertools.count(2)))
    for (_, _, _, size, _), tasks in alike.items():  # type: ignore[misc]
        jobs.append(_job(tasks, size, path, names))
    return jobs


def _job(tasks: Sequence[Request], size: int, path: Path, names: Iterator[str]) -> Job:
    config, number = tasks[0].config, tasks[0].number
    workdir = for_job.workdir_of(config)
    if len(tasks) == 1:
        text = script.render(config, path / str(number), workdir)
        return Job(tasks, f"{number}/{runfolder.SCRIPT}", text, size, set())
    configs = [task.config for task in tasks]
    text = array.render(configs, [task.number for task in tasks], path, workdir, size)
    return Job(tasks, next(names), text, size, array.differing(configs))
