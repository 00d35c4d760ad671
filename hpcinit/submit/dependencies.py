"""--dependency: the jobs that are waited for, by the ids or the runs that a user names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from hpcinit.base.errors import RequestError
from hpcinit.base.text import expanded
from hpcinit.config.checks import jobs_named
from hpcinit.config.schema import Config

if TYPE_CHECKING:
    from hpcinit.observe.state import State

NOT_SUBMITTED = "NOT_SUBMITTED"  # observe.sweep's, which is not imported for a plain submission
KINDS = {"after": "afterany", "after_ok": "afterok"}  # sbatch(1), --dependency
JOB_ID = re.compile(r"\d+(_\d+)?")  # '4242', and '4242_7' of an array


def dependency_option(config: Config) -> str | None:
    """'afterany:41:42,afterok:40,singleton', or None. Raises RequestError for a run that cannot be waited for."""
    parts = []
    for key, kind in KINDS.items():
        if ids := list(dict.fromkeys(_ids(key, config))):
            parts.append(":".join([kind, *ids]))
    return ",".join([*parts, *(["singleton"] if config.singleton else [])]) or None


def dependency_problems(config: Config) -> Iterator[str]:
    """One message for each word that means no job."""
    for key in KINDS:
        for word in jobs_named(getattr(config, key)):
            try:
                list(_job_ids(key, word, config))
            except RequestError as error:
                yield str(error)


def _ids(key: str, config: Config) -> Iterator[str]:
    for word in jobs_named(getattr(config, key)):
        yield from _job_ids(key, word, config)


def _job_ids(key: str, word: str, config: Config) -> Iterator[str]:
    """The jobs to wait for; none that has ended as asked already. Of a chain the last of its jobs, of a sweep all."""
    for job_id, states in _targets(key, word, config.runs_dir):
        if any(now.forgotten for now in states):
            raise RequestError(
                f"{key}={word}: Slurm knows no job {job_id}, and would start this one at once: is the id right? If the "
                f"job ended long ago, leave {key} out"
            )
        bad = [now for now in states if now.name == NOT_SUBMITTED or (now.over and now.name != "COMPLETED")]
        if bad and key == "after_ok":
            raise RequestError(
                f"{key}={word}: job {bad[0].job_id} ended as {bad[0].name}, and this one would never start; leave "
                f"{key} out, or say after={word}, whatever its end"
            )
        # Where nobody can be asked it is a dry run.
        if not all(now.over or now.name == NOT_SUBMITTED for now in states):
            yield job_id


@cache
def _targets(key: str, word: str, runs_dir: str) -> list[tuple[str, list[State]]]:
    """The jobs that `word` means, and how each is, an array's tasks one by one: asked once, to check and to render."""
    from hpcinit.observe import find_runs, state  # noqa: PLC0415 - psutil, only for those who wait for a job

    if JOB_ID.fullmatch(word):
        return [(word, state.of_array(word))]
    try:
        path = find_runs.find_run(word, expanded(runs_dir))
        record = state.submission(path)
        if record["engine"] != "slurm":
            raise RequestError(
                f"{path} runs without Slurm (engine: {record['engine']}): no job of Slurm's can wait for it"
            )
        if find_runs.is_sweep(path):
            arrays: dict[str, list[State]] = {}
            for task in find_runs.read_sweep(path):
                arrays.setdefault(task.state.job_id.partition("_")[0], []).append(task.state)
            return list(arrays.items())
        now = state.read(path)
    except RequestError as error:
        raise RequestError(f"{key}={word}: {error}") from None
    return [(now.job_id if now.by_hand else state.jobs(record)[-1], [now])]
