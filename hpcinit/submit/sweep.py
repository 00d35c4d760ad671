"""Submits a sweep to Slurm.

Combinations with the same resources share a job array. Each task has its own run folder.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcinit.base.errors import SubmitError
from hpcinit.base.text import counted, ranges
from hpcinit.checks import duplicates, validate
from hpcinit.config import job_spec
from hpcinit.config.request import Request
from hpcinit.records import run_folder, secret_names
from hpcinit.submit import array, folder, job_environment, script, transaction
from hpcinit.submit.provenance import Provenance
from hpcinit.submit.transaction import Transaction


@dataclass(frozen=True)
class Job:
    """A job or a job array of the sweep, which one call of sbatch submits.

    file: the name of the script in the sweep's folder.
    text: the script.
    size: the largest number of tasks in one array of this sweep.
    """

    requests: Sequence[Request]
    file: str
    text: str
    size: int

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
        return f"an array of {counted(len(self.requests), 'task')}, {ranges(self.numbers)}: {first} to {last}"

    def id_of(self, number: int, job_id: str) -> str:
        """Return Slurm's id of a task, such as '4242_17' for the task with index 17."""
        return f"{job_id}_{number % self.size}" if self.is_array else job_id


def sweep_jobs(requests: Sequence[Request], path: Path, argv: Sequence[str]) -> list[Job]:
    """Return the jobs that the sweep in `path` needs, in the order of their first tasks.

    argv: the command line, without secrets.
    """
    alike: dict[object, list[Request]] = {}
    for request in requests:
        config = request.config
        size = array.block(config.cluster.max_array_size)
        own = (repr(config.secrets), repr(config.secret_names), size, request.number // size)
        alike.setdefault((array.shape(config, path, job_spec.workdir(config)), *own), []).append(request)
    jobs = []
    names = itertools.chain([run_folder.SCRIPT], (f"job-{at}.sh" for at in itertools.count(2)))
    for (_, _, _, size, _), tasks in alike.items():  # type: ignore[misc]
        jobs.append(_job(tasks, size, path, names, argv))
    return jobs


def _job(tasks: Sequence[Request], size: int, path: Path, names: Iterator[str], argv: Sequence[str]) -> Job:
    config, number = tasks[0].config, tasks[0].number
    workdir = job_spec.workdir(config)
    if len(tasks) == 1:
        run = path / str(number)
        text = script.render(config, run, workdir, origin=script.origin(config, argv, run))
        return Job(tasks, f"{number}/{run_folder.SCRIPT}", text, size)
    configs = [task.config for task in tasks]
    origin = script.origin(config, argv, path / "TASK")
    text = array.render(configs, [task.number for task in tasks], path, workdir, size, origin)
    return Job(tasks, next(names), text, size)


# The sweep's folder contains its own files and a run folder for each task.

FORMAT = 1
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def fill_sweep_folder(
    path: Path, requests: Sequence[Request], jobs: Sequence[Job], provenance: Provenance
) -> dict[int, dict[str, Any]]:
    """Write all files of the sweep except submission.json, which is written when the jobs exist.

    For each task, return the part of its submission.json that describes the request: the program, and what the user
    typed. Raise SubmitError if a file cannot be written.
    """
    summaries: dict[int, dict[str, Any]] = {}
    sections: dict[tuple[str, str], str] = {}
    tasks = {str(request.number): list(request.parameters) or [request.combination] for request in requests}
    try:
        for request in requests:
            task = f"{path}/{request.number}"
            folder.make(task)
            spec = job_environment.make_spec(request.config, job_spec.workdir(request.config))
            typed = secret_names.masked(request.given, request.config.secret_names)
            summaries[request.number] = {"program": spec.command(), "typed": typed}
            folder.write(f"{task}/{run_folder.SPEC}", spec.to_json())
            folder.write(f"{task}/{run_folder.CONFIG}", _yaml(request.document, sections))
        for job in jobs:
            folder.write(f"{path}/{job.file}", job.text)
        folder.write(f"{path}/{run_folder.SWEEP}", json.dumps({"format": FORMAT, "tasks": tasks}, indent=1) + "\n")
        folder.write(f"{path}/{run_folder.PROVENANCE}", provenance.to_json())
    except OSError as error:
        raise folder.cannot_write(path, error) from None
    return summaries


def _write_record(task: Path, record: Mapping[str, Any]) -> None:
    folder.write(f"{task}/{run_folder.SUBMISSION}", json.dumps(record, indent=2) + "\n")


def _yaml(document: Mapping[str, Any], known: dict[tuple[str, str], str]) -> str:
    """Return what yaml.safe_dump returns, but format each section only once. `known` caches the sections."""
    parts = []
    for name, value in document.items():
        key = (name, repr(value))
        if key not in known:
            known[key] = yaml.dump({name: value}, Dumper=DUMPER, sort_keys=False)
        parts.append(known[key])
    return "".join(parts)


@dataclass(frozen=True)
class Submitted:
    """A sweep whose jobs have been submitted.

    ids: the job id of each submitted task, by the task's number.
    refused: why the other tasks were not submitted, or ''.
    expected: the start times that Slurm estimates, one line each.
    """

    path: Path
    ids: Mapping[int, str]
    dropped: job_environment.DroppedVariables
    interrupted: bool
    refused: str = ""
    expected: Sequence[str] = ()


def is_one(requests: Sequence[Request]) -> bool:
    """Return whether `requests` can be submitted together, as job arrays."""
    configs = [request.config for request in requests]
    return (
        len(configs) > 1
        and all(one.engine.has_queue and one.chain == 1 and one.snapshot == "none" for one in configs)
        and len({(config.runs_dir, config.dry_run, config.wait) for config in configs}) == 1
    )


def dry_run(requests: Sequence[Request], argv: Sequence[str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield, for each job that submit_all() would submit, a description, the script, and the files of its tasks."""
    config = requests[0].config
    path = folder.next_path(job_spec.runs_dir(config), config.name)
    for job in sweep_jobs(requests, path, secret_names.masked(argv, config.secret_names)):
        files: dict[str, str] = {}
        for request in job.requests:
            own = transaction.files_read(request.config, job_spec.workdir(request.config))
            files |= {f"{request.number}/{name}": text for name, text in own.items()}
        yield job.about, job.text, files


def submit_all(
    requests: Sequence[Request],
    argv: Sequence[str],
    write_more: Callable[[Path, int], None] = lambda path, number: None,
) -> Submitted:
    """Create the folder of the sweep and submit its jobs. The requests must have passed their checks.

    Raise RequestError if the same sweep is already queued, and SubmitError if no job was submitted. In both cases the
    folder is removed. If MaybeSubmitted is raised, the folder is kept.

    write_more: a function that writes additional files into the run folder of the request with this number.
    """
    config = requests[0].config
    tasks = [request.combination for request in requests]
    document = {**requests[0].document, "combinations": tasks}
    request = duplicates.request_hash(document, job_spec.workdir(config), job_spec.runs_dir(config))
    ids: dict[int, str] = {}
    records: list[dict[str, Any]] = []
    refused = ""
    expected: list[str] = []
    started: list[Transaction] = []
    try:
        with transaction.begin(config, argv, ()) as one:
            started.append(one)
            path = one.path
            jobs = sweep_jobs(requests, path, one.provenance.argv)
            one.refuse_duplicates(request, len(jobs))
            one.parts = [path / str(request.number) for request in requests]
            summaries = fill_sweep_folder(path, requests, jobs, one.provenance)
            for each in requests:
                write_more(path / str(each.number), each.number)
            one.check_with_slurm()
            if config.validate:  # validate all jobs before the first one is submitted
                expected = _expected(jobs, [validate.sbatch_test_only(path / job.file, one.env) for job in jobs])
            for job in jobs:
                one.check_interrupted()
                _hand_over(one, job, summaries, records, ids)
    except (SubmitError, KeyboardInterrupt) as error:
        if not ids:
            raise
        refused = str(error)
    one = started[0]
    return Submitted(one.path, ids, one.dropped, one.interrupted, refused, expected)


def _expected(jobs: Sequence[Job], estimates: Sequence[str]) -> list[str]:
    """Return the start times that Slurm estimates, without repetitions.

    With several jobs, each line names its tasks. Return [] if the jobs have dependencies, because Slurm's estimates
    ignore them.
    """
    config = jobs[0].requests[0].config
    if config.dependency:
        return []
    tasks: dict[str, list[int]] = {}
    for job, estimate in zip(jobs[:1] if config.sweep.at_once else jobs, estimates, strict=False):
        if estimate:
            tasks.setdefault(estimate, []).extend(job.numbers)
    if len(jobs) == 1:
        return list(tasks)
    return [f"tasks {ranges(sorted(numbers))}: {estimate}" for estimate, numbers in tasks.items()]


def _hand_over(
    one: Transaction,
    job: Job,
    summaries: Mapping[int, Mapping[str, Any]],
    records: list[dict[str, Any]],
    ids: dict[int, str],
) -> None:
    """Submit one job of the sweep, and write submission.json for each of its tasks.

    Add the job's record to `records`, and the ids of its tasks to `ids`.
    """
    config = job.requests[0].config
    # With sweep.at_once, each array starts after the previous one, because the limit is for the whole sweep.
    after = [f"--dependency=afterany:{records[-1]['job_id']}"] if config.sweep.at_once and records else []
    parts = [one.path / str(number) for number in job.numbers]
    job_id, command = one.submit(one.path / job.file, after, parts)
    record = one.record(job_id, command)
    records.append({"job_id": job_id, "script": job.file, "tasks": ranges(job.numbers), "size": job.size})
    transaction.mark(one.path, {**record, "job_id": records[0]["job_id"], "sweep": records})
    for number in job.numbers:
        task_id = job.id_of(number, job_id)
        of_task = {**record, **summaries[number], "job_id": task_id}
        transaction.mark(one.path / str(number), of_task, _write_record)
    ids |= {number: job.id_of(number, job_id) for number in job.numbers}
