"""A sweep on Slurm: one job array for the combinations that ask Slurm for the same, one run folder for each task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcinit.config.compose import Request
from hpcinit.facts.errors import SubmitError
from hpcinit.facts.ranges import ranges
from hpcinit.submission import ask, environment, folder, for_job, sweep_folder, sweep_jobs, transaction, twice
from hpcinit.submission.sweep_jobs import Job
from hpcinit.submission.transaction import Transaction


@dataclass(frozen=True)
class Submitted:
    """A sweep whose jobs exist. ids: the job of each task, by its number, of those that were submitted.

    refused: why the others were not, or ''. expected: when Slurm would start the jobs, if it says, a line each.
    """

    path: Path
    ids: Mapping[int, str]
    dropped: environment.Dropped
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
    for job in sweep_jobs.of(requests, folder.next_path(for_job.runs_dir_of(config), config.name)):
        yield job.about, job.text


def submit_all(requests: Sequence[Request], argv: Sequence[str]) -> Submitted:
    """Write the sweep's folder and hand its jobs to Slurm. The requests have passed their checks.

    Raise RequestError where the same sweep is queued already, and SubmitError if there is no job at all; the folder is
    then removed, except with MaybeSubmitted.
    """
    config = requests[0].config
    tasks = [request.combination for request in requests]
    document = {**requests[0].document, "combinations": tasks}
    request = twice.request_hash(document, for_job.workdir_of(config), for_job.runs_dir_of(config))
    ids: dict[int, str] = {}
    records: list[dict[str, Any]] = []
    refused = ""
    expected: list[str] = []
    started: list[Transaction] = []
    try:
        with transaction.begin(config, argv, ()) as one:
            started.append(one)
            path = one.path
            jobs = sweep_jobs.of(requests, path)
            one.refuse_duplicates(request, len(jobs))
            one.parts = [path / str(request.number) for request in requests]
            sweep_folder.fill(path, requests, jobs, one.provenance)
            one.check_duplicates()
            if config.test_only:  # all of them before the first is submitted
                expected = _expected(jobs, [ask.test_only(path / job.file, one.env) for job in jobs])
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
        sweep_folder.mark(one.path / str(number), {**record, "job_id": task_id})
    ids |= {number: job.id_of(number, job_id) for number in job.numbers}
