"""A sweep on Slurm: one job array for the combinations that ask Slurm for the same, one run folder for each task."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcinit.config.compose import Request
from hpcinit.facts import secret_names
from hpcinit.facts.errors import MaybeSubmitted, SubmitError
from hpcinit.facts.ranges import ranges
from hpcinit.submission import (
    ask,
    claim,
    environment,
    folder,
    for_job,
    interrupts,
    once,
    queue,
    submit,
    sweep_folder,
    sweep_jobs,
    twice,
)
from hpcinit.submission.provenance import Provenance
from hpcinit.submission.sweep_jobs import Job


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

    Raises RequestError where the same sweep is queued already, and SubmitError if there is no job at all; the folder is
    then gone, except with MaybeSubmitted.
    """
    config = requests[0].config
    submit.require_sbatch(config)
    for one in requests:
        submit.pack(one.config)
    workdir, runs_dir = for_job.workdir_of(config), for_job.runs_dir_of(config)
    provenance = Provenance(workdir, secret_names.masked(argv, config.secret_names))
    env, dropped = environment.of_job(os.environ, config.secrets, config.secret_names, devices=True)
    tasks = [request.combination for request in requests]
    request = twice.request_hash({**requests[0].document, "combinations": tasks}, workdir, runs_dir)
    with interrupts.deferred() as interrupted, ExitStack() as claims:
        path = folder.claim(runs_dir, config.name, ())
        ids: dict[int, str] = {}
        records: list[dict[str, Any]] = []
        refused = ""
        expected: list[str] = []
        token = ""  # of the job that is being submitted
        try:
            jobs = sweep_jobs.of(requests, path)
            question = None
            if not config.again:
                longest_s = once.longest_s(config.cluster.submit_patience_s, len(jobs))
                claims.enter_context(claim.held(path, request, longest_s))
                question = queue.Question(env, over=False)  # answered while we write
            sweep_folder.fill(path, requests, jobs, provenance)
            if question is not None:
                twice.refuse(question, request)
            if config.test_only:  # all of them before the first is submitted
                expected = _expected(jobs, [ask.test_only(path / job.file, env) for job in jobs])
            for job in jobs:
                if interrupted:
                    raise KeyboardInterrupt
                token = once.token(request)
                ids |= _hand_over(path, job, env, token, records, lambda: bool(interrupted))
        except BaseException as seen:
            known = isinstance(seen, (SubmitError, KeyboardInterrupt))
            error = once.unexpected(seen, token) if token and not known else seen
            if not isinstance(error, MaybeSubmitted):
                sweep_folder.forget(path, requests, ids)
            if not ids or not isinstance(error, (SubmitError, KeyboardInterrupt)):
                raise error from (seen if error is not seen else seen.__cause__)
            refused = str(error)
    return Submitted(path, ids, dropped, bool(interrupted), refused, expected)


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


def _hand_over(
    path: Path,
    job: Job,
    env: Mapping[str, str],
    token: str,
    records: list[dict[str, Any]],
    interrupted: Callable[[], bool],
) -> dict[int, str]:
    """Submit one job and mark its tasks; the job id of each. `records` has what was submitted before."""
    config = job.requests[0].config
    # With a cap on all of the sweep, one array starts when the one before has ended.
    after = [f"--dependency=afterany:{records[-1]['job_id']}"] if config.sweep.at_once and records else []
    job_id, command = submit.sbatch(config, path / job.file, env, token, after, interrupted)
    record = {
        "job_id": job_id,
        "engine": "slurm",
        "cluster": config.cluster.name,
        "token": token,
        "submitted": time.time(),
        "command": list(command),
    }
    records.append({"job_id": job_id, "script": job.file, "tasks": ranges(job.numbers), "size": job.size})
    ids = {number: job.id_of(number, job_id) for number in job.numbers}
    submit.mark(path, {**record, "job_id": records[0]["job_id"], "sweep": records})
    for number, task_id in ids.items():
        sweep_folder.mark(path / str(number), {**record, "job_id": task_id})
    return ids
