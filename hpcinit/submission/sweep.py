"""A sweep on Slurm: one job array for the combinations that ask Slurm for the same, one run folder for each task."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcinit.config.request import Request
from hpcinit.facts import runfolder, secret_names
from hpcinit.facts.errors import MaybeSubmitted, SubmitError
from hpcinit.facts.ranges import ranges
from hpcinit.submission import array, ask, environment, folder, for_job, interrupts, once, queue, script, submit, twice
from hpcinit.submission.provenance import Provenance

FORMAT = 1
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


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

    def id_of(self, number: int, job_id: str) -> str:
        """'4242_17', as Slurm calls the task with index 17."""
        return f"{job_id}_{number % self.size}" if self.is_array else job_id


@dataclass(frozen=True)
class Submitted:
    """A sweep whose jobs exist. ids: the job of each task, by its number, of those that were submitted.

    refused: why the others were not, or ''. expected: when Slurm would start the first job, if it says.
    """

    path: Path
    ids: Mapping[int, str]
    dropped: environment.Dropped
    interrupted: bool
    refused: str = ""
    expected: str = ""


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


def plan(requests: Sequence[Request], path: Path) -> list[Job]:
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


def dry_run(requests: Sequence[Request]) -> Iterator[tuple[str, str]]:
    """(what it is of, the script) of each job that submit() would submit now."""
    config = requests[0].config
    for job in plan(requests, folder.next_path(for_job.runs_dir_of(config), config.name)):
        yield _about(job), job.text


def _about(job: Job) -> str:
    if not job.is_array:
        return job.requests[0].combination
    first, last = job.requests[0].combination, job.requests[-1].combination
    return f"an array of {len(job.requests)} tasks, {ranges(job.numbers)}: {first} to {last}"


def submit_all(requests: Sequence[Request], argv: Sequence[str]) -> Submitted:
    """Write the sweep's folder and hand its jobs to Slurm. The requests have passed their checks.

    Raises RequestError where the same sweep is queued already, and SubmitError if there is no job at all; the folder is
    then gone, except with MaybeSubmitted.
    """
    config = requests[0].config
    submit.require_sbatch(config)
    workdir, runs_dir = for_job.workdir_of(config), for_job.runs_dir_of(config)
    provenance = Provenance(workdir, secret_names.masked(argv, config.secret_names))
    env, dropped = environment.of_job(os.environ, config.secrets, config.secret_names, devices=True)
    tasks = [request.combination for request in requests]
    request = twice.request_hash({**requests[0].document, "combinations": tasks}, workdir, runs_dir)
    question = None if config.again else queue.Question(env, over=False)  # answered while we write
    with interrupts.deferred() as interrupted:
        path = folder.claim(runs_dir, config.name, ())
        ids: dict[int, str] = {}
        records: list[dict[str, Any]] = []
        refused = expected = ""
        try:
            jobs = plan(requests, path)
            _fill(path, requests, jobs, provenance)
            if question is not None:
                twice.refuse(question, request)
            for job in jobs:  # all of them before the first is submitted
                said = ask.test_only(path / job.file, env) if config.test_only else ""
                # An estimate knows nothing of what the job waits for.
                expected = expected or ("" if config.after or config.after_ok or config.singleton else said)
            for job in jobs:
                if interrupted:
                    raise KeyboardInterrupt
                ids |= _hand_over(path, job, env, once.token(request), records, lambda: bool(interrupted))
        except BaseException as error:
            if not isinstance(error, MaybeSubmitted):
                _forget(path, requests, ids)
            if not ids or not isinstance(error, (SubmitError, KeyboardInterrupt)):
                raise
            refused = str(error)
    return Submitted(path, ids, dropped, bool(interrupted), refused, expected)


def _fill(path: Path, requests: Sequence[Request], jobs: Sequence[Job], provenance: Provenance) -> None:
    names = {request.number: job.env_names for job in jobs for request in job.requests}
    sections: dict[tuple[str, str], str] = {}
    tasks = {str(request.number): request.combination for request in requests}
    try:
        for request in requests:
            task = f"{path}/{request.number}"
            folder.make(task)
            _write(
                f"{task}/{runfolder.SPEC}",
                for_job.make_spec(request.config, for_job.workdir_of(request.config)).to_json(),
            )
            _write(f"{task}/{runfolder.CONFIG}", _yaml(request.document, sections))
            if names[request.number]:
                _write(f"{task}/{runfolder.ENV}", array.env_file(request.config, names[request.number]))
        for job in jobs:
            _write(f"{path}/{job.file}", job.text)
        _write(f"{path}/{runfolder.SWEEP}", json.dumps({"format": FORMAT, "tasks": tasks}, indent=1) + "\n")
        _write(f"{path}/{runfolder.PROVENANCE}", provenance.to_json())
    except OSError as error:
        raise folder.cannot_write(path, error) from None


def _write(path: str, text: str) -> None:
    """In four calls of the system; a thousand tasks are thousands of files."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        data = text.encode()
        while data:  # a disk that is almost full takes a part
            data = data[os.write(file, data) :]
    finally:
        os.close(file)


def _yaml(document: Mapping[str, Any], known: dict[tuple[str, str], str]) -> str:
    """As yaml.safe_dump; each section that is the same in several tasks once."""
    parts = []
    for name, value in document.items():
        key = (name, repr(value))
        if key not in known:
            known[key] = yaml.dump({name: value}, Dumper=DUMPER, sort_keys=False)
        parts.append(known[key])
    return "".join(parts)


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
    if config.test_only:
        ask.test_only(path / job.file, env)
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
        _mark(path / str(number), {**record, "job_id": task_id})
    return ids


def _mark(task: Path, record: Mapping[str, Any]) -> None:
    try:
        _write(f"{task}/{runfolder.SUBMISSION}", json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise MaybeSubmitted(
            f"job {record['job_id']} was submitted, but its record {task / runfolder.SUBMISSION} cannot be written: "
            f"{error.strerror}; it runs, and `scancel {record['job_id']}` ends it"
        ) from None


def _forget(path: Path, requests: Sequence[Request], ids: Mapping[int, str]) -> None:
    """Take away what never became a job."""
    if not ids:
        folder.discard(path)
    else:
        for request in requests:
            if request.number not in ids:
                shutil.rmtree(path / str(request.number), ignore_errors=True)
