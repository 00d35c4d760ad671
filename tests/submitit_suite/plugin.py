"""A pytest plugin: submitit's tests get hpcinit's executors. `expected.txt` lists which of them pass.

SlurmExecutor becomes hpcinit.Executor without a cluster. MockedSubprocess of submitit's tests answers for sbatch and
sacct, so what hpcinit starts is sent to it: sbatch with other options, and squeue. LocalExecutor becomes
hpcinit.Executor with cluster=local, which runs the functions.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import submitit
from submitit.local import local
from submitit.slurm import slurm

import hpcinit
from hpcinit.slurm import queue, slurm_client
from hpcinit.submit import executor

TABLE = Path(__file__).parent / "expected.txt"
_start = slurm_client.start
_jobs: list[Any] = []  # of the test that runs, on this machine


class LocalExecutor(hpcinit.Executor):
    """hpcinit's executor, with the name and the arguments of submitit's."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, cluster="local", **more)

    @classmethod
    def name(cls) -> str:
        return "local"

    def _internal_process_submissions(self, delayed_submissions: list[Any]) -> list[Any]:
        jobs = super()._internal_process_submissions(delayed_submissions)
        _jobs.extend(jobs)
        return jobs


class Answer(NamedTuple):
    """What the mock prints, as a slurm_client.Call returns it."""

    command: Sequence[str]
    stdout: str

    def output(self, at_most: timedelta | None = None) -> slurm_client.Output:
        return slurm_client.Output(self.command, 0, self.stdout, "")


def start(command: Sequence[str], env: Mapping[str, str] | None = None) -> Any:
    """Send the command to the mock of submitit's tests. Without the mock, start it."""
    mock: Any = subprocess.check_output
    if not hasattr(mock, "job_sacct"):
        return _start(command, env)
    if command[0] == "sbatch":  # hpcinit uses --parsable, which prints the id alone
        return Answer(command, mock(["sbatch", command[-1]]).decode().split()[-1])
    if command[0] != "squeue":
        return Answer(command, "")
    rows = [line.split("|") for line in mock(["sacct"]).decode().splitlines()]
    jobs = [(job, state.strip()) for job, state in rows if job != "JobID" and "." not in job]
    return Answer(command, "\n".join(queue.SEPARATOR.join([*job, *[""] * 6]) for job in jobs))


slurm_client.start = start
slurm.SlurmExecutor = submitit.SlurmExecutor = hpcinit.Executor
slurm.SlurmJob, slurm.SlurmInfoWatcher = executor.Job, executor.Watcher
local.LocalExecutor = submitit.LocalExecutor = LocalExecutor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the results of the table. Raise UsageError if a test has no line there, or a line has no test."""
    table = [line.split(" | ") for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    expected = {name: (verdict, *reason) for verdict, name, *reason in table}
    folder = Path(submitit.__file__).parent
    found = {f"{item.path.relative_to(folder).as_posix()}::{item.name}": item for item in items}
    if different := sorted(expected.keys() ^ found.keys()):
        raise pytest.UsageError(f"{TABLE} and submitit {submitit.__version__} do not have the same tests: {different}")
    for name, (verdict, *reason) in expected.items():
        if verdict == "not applicable":
            found[name].add_marker(pytest.mark.xfail(strict=True, reason=reason[0]))
        elif verdict == "not run":
            found[name].add_marker(pytest.mark.skip(reason=reason[0]))


@pytest.fixture(autouse=True)
def _no_job_is_left() -> Iterator[None]:
    yield
    for job in _jobs:
        if not job.done():
            job.cancel(check=False)
    _jobs.clear()
