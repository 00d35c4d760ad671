"""A sweep on Slurm: one job array for the combinations that ask Slurm for the same, one run folder for each task."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcinit.base.errors import MaybeSubmitted, SubmitError
from hpcinit.base.text import ranges
from hpcinit.config.compose import Request
from hpcinit.records import run_folder
from hpcinit.submit import array, duplicates, folder, job_environment, script, transaction, validate
from hpcinit.submit.provenance import Provenance
from hpcinit.submit.transaction import Transaction

# The jobs that a sweep on Slurm becomes: arrays of combinations that ask for the same, plain jobs of those alone.


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


def sweep_jobs(requests: Sequence[Request], path: Path) -> list[Job]:
    """The jobs of the sweep in `path`, in the order of their first tasks."""
    alike: dict[object, list[Request]] = {}
    for request in requests:
        config = request.config
        size = array.block(config.cluster.max_array_size)
        own = (repr(config.secrets), repr(config.secret_names), size, request.number // size)
        alike.setdefault((array.shape(config, path, job_environment.workdir_of(config)), *own), []).append(request)
    jobs = []
    names = itertools.chain([run_folder.SCRIPT], (f"job-{at}.sh" for at in itertools.count(2)))
    for (_, _, _, size, _), tasks in alike.items():  # type: ignore[misc]
        jobs.append(_job(tasks, size, path, names))
    return jobs


def _job(tasks: Sequence[Request], size: int, path: Path, names: Iterator[str]) -> Job:
    config, number = tasks[0].config, tasks[0].number
    workdir = job_environment.workdir_of(config)
    if len(tasks) == 1:
        text = script.render(config, path / str(number), workdir)
        return Job(tasks, f"{number}/{run_folder.SCRIPT}", text, size, set())
    configs = [task.config for task in tasks]
    text = array.render(configs, [task.number for task in tasks], path, workdir, size)
    return Job(tasks, next(names), text, size, array.differing(configs))


# A sweep's folder on the disk: what stands in it once, and a run folder for each task.

FORMAT = 1
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def fill_sweep_folder(path: Path, requests: Sequence[Request], jobs: Sequence[Job], provenance: Provenance) -> None:
    """Everything but what says that the jobs exist. Raises SubmitError."""
    names = {request.number: job.env_names for job in jobs for request in job.requests}
    sections: dict[tuple[str, str], str] = {}
    tasks = {str(request.number): request.combination for request in requests}
    try:
        for request in requests:
            task = f"{path}/{request.number}"
            folder.make(task)
            folder.write(
                f"{task}/{run_folder.SPEC}",
                job_environment.make_spec(request.config, job_environment.workdir_of(request.config)).to_json(),
            )
            folder.write(f"{task}/{run_folder.CONFIG}", _yaml(request.document, sections))
            if names[request.number]:
                folder.write(f"{task}/{run_folder.ENV}", array.env_file(request.config, names[request.number]))
        for job in jobs:
            folder.write(f"{path}/{job.file}", job.text)
        folder.write(f"{path}/{run_folder.SWEEP}", json.dumps({"format": FORMAT, "tasks": tasks}, indent=1) + "\n")
        folder.write(f"{path}/{run_folder.PROVENANCE}", provenance.to_json())
    except OSError as error:
        raise folder.cannot_write(path, error) from None


def mark_sweep(task: Path, record: Mapping[str, Any]) -> None:
    """The task's job exists. Raises MaybeSubmitted."""
    try:
        folder.write(f"{task}/{run_folder.SUBMISSION}", json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise MaybeSubmitted(
            f"job {record['job_id']} was submitted, but its record {task / run_folder.SUBMISSION} cannot be written: "
            f"{error.strerror}; it runs, and `scancel {record['job_id']}` ends it"
        ) from None


def _yaml(document: Mapping[str, Any], known: dict[tuple[str, str], str]) -> str:
    """As yaml.safe_dump; each section that is the same in several tasks once."""
    parts = []
    for name, value in document.items():
        key = (name, repr(value))
        if key not in known:
            known[key] = yaml.dump({name: value}, Dumper=DUMPER, sort_keys=False)
        parts.append(known[key])
    return "".join(parts)


@dataclass(frozen=True)
class Submitted:
    """A sweep whose jobs exist. ids: the job of each task, by its number, of those that were submitted.

    refused: why the others were not, or ''. expected: when Slurm would start the jobs, if it says, a line each.
    """

    path: Path
    ids: Mapping[int, str]
    dropped: job_environment.DroppedVariables
    interrupted: bool
    refused: str = ""
    expected: Sequence[str] = ()


def is_one(requests: Sequence[Request]) -> bool:
    """Whether `requests` can be submitted as arrays."""
    configs = [request.config for request in requests]
    return (
        len(configs) > 1
        and all(
            config.cluster.engine == "slurm" and config.chain == 1 and config.snapshot == "none" for config in configs
        )
        and len({(config.runs_dir, config.dry_run, config.wait) for config in configs}) == 1
    )


def dry_run(requests: Sequence[Request]) -> Iterator[tuple[str, str]]:
    """(what it is of, the script) of each job that submit() would submit now."""
    config = requests[0].config
    for job in sweep_jobs(requests, folder.next_path(job_environment.runs_dir_of(config), config.name)):
        yield job.about, job.text


def submit_all(requests: Sequence[Request], argv: Sequence[str]) -> Submitted:
    """Write the sweep's folder and hand its jobs to Slurm. The requests have passed their checks.

    Raise RequestError where the same sweep is queued already, and SubmitError if there is no job at all; the folder is
    then removed, except with MaybeSubmitted.
    """
    config = requests[0].config
    tasks = [request.combination for request in requests]
    document = {**requests[0].document, "combinations": tasks}
    request = duplicates.request_hash(document, job_environment.workdir_of(config), job_environment.runs_dir_of(config))
    ids: dict[int, str] = {}
    records: list[dict[str, Any]] = []
    refused = ""
    expected: list[str] = []
    started: list[Transaction] = []
    try:
        with transaction.begin(config, argv, ()) as one:
            started.append(one)
            path = one.path
            jobs = sweep_jobs(requests, path)
            one.refuse_duplicates(request, len(jobs))
            one.parts = [path / str(request.number) for request in requests]
            fill_sweep_folder(path, requests, jobs, one.provenance)
            one.check_duplicates()
            if config.test_only:  # all of them before the first is submitted
                expected = _expected(jobs, [validate.sbatch_test_only(path / job.file, one.env) for job in jobs])
            for job in jobs:
                one.check_interrupted()
                _hand_over(one, job, records, ids)
    except (SubmitError, KeyboardInterrupt) as error:
        if not ids:
            raise
        refused = str(error)
    one = started[0]
    return Submitted(one.path, ids, one.dropped, one.interrupted, refused, expected)


def _expected(jobs: Sequence[Job], said: Sequence[str]) -> list[str]:
    """Slurm's estimates, each once, with the tasks that it is for where there are several jobs.

    said: of each job. None where the jobs wait for something: an estimate knows nothing of it.
    """
    config = jobs[0].requests[0].config
    if config.after or config.after_ok or config.singleton:
        return []
    of: dict[str, list[int]] = {}
    for job, words in zip(jobs[:1] if config.sweep.at_once else jobs, said, strict=False):
        if words:
            of.setdefault(words, []).extend(job.numbers)
    return [words if len(jobs) == 1 else f"tasks {ranges(sorted(numbers))}: {words}" for words, numbers in of.items()]


def _hand_over(one: Transaction, job: Job, records: list[dict[str, Any]], ids: dict[int, str]) -> None:
    """Submit one job, mark its tasks, and add it to `records` (one per job) and `ids` (the job id of each task)."""
    config = job.requests[0].config
    # With a cap on all of the sweep, one array starts when the one before has ended.
    after = [f"--dependency=afterany:{records[-1]['job_id']}"] if config.sweep.at_once and records else []
    parts = [one.path / str(number) for number in job.numbers]
    job_id, command = one.submit(one.path / job.file, after, parts)
    record = one.record(job_id, command)
    records.append({"job_id": job_id, "script": job.file, "tasks": ranges(job.numbers), "size": job.size})
    transaction.mark(one.path, {**record, "job_id": records[0]["job_id"], "sweep": records})
    for number in job.numbers:
        task_id = job.id_of(number, job_id)
        mark_sweep(one.path / str(number), {**record, "job_id": task_id})
    ids |= {number: job.id_of(number, job_id) for number in job.numbers}
