"""--dependency: the jobs that are waited for, by the ids or the runs that a user names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hpcinit.config.chains import words
from hpcinit.config.schema import Config
from hpcinit.facts.errors import RequestError

if TYPE_CHECKING:
    from hpcinit.observe.state import State

NOBODY = "nobody"  # observe.state.NOBODY, which is not imported for a plain submission
KINDS = {"after": "afterany", "after_ok": "afterok"}  # sbatch(1), --dependency
JOB_ID = re.compile(r"\d+(_\d+)?")  # '4242', and '4242_7' of an array


def dependency(config: Config) -> str | None:
    """'afterany:41:42,afterok:40,singleton', or None. Raises RequestError for a run that cannot be waited for."""
    parts = []
    for key, kind in KINDS.items():
        if ids := list(dict.fromkeys(_ids(key, config))):
            parts.append(":".join([kind, *ids]))
    return ",".join([*parts, *(["singleton"] if config.singleton else [])]) or None


def problems(config: Config) -> Iterator[str]:
    """One message for each word that means no job."""
    for key in KINDS:
        for word in words(getattr(config, key)):
            try:
                _job_id(key, word, config)
            except RequestError as error:
                yield str(error)


def _ids(key: str, config: Config) -> Iterator[str]:
    for word in words(getattr(config, key)):
        if job_id := _job_id(key, word, config):
            yield job_id


def _job_id(key: str, word: str, config: Config) -> str | None:
    """The job to wait for; None if it has ended as asked already. Of a run that is a chain, the last of its jobs."""
    job_id, now = _state(key, word, config.runs_dir)
    if now.source == NOBODY:
        return job_id  # Slurm cannot be asked here: a dry run
    if now.forgotten:
        raise RequestError(
            f"{key}={word}: Slurm knows no job {job_id}, and would start this one at once: is the id right? If the job "
            f"ended long ago, leave {key} out"
        )
    if now.over and key == "after_ok" and now.name != "COMPLETED":
        raise RequestError(
            f"{key}={word}: job {now.job_id} ended as {now.name}, and this one would never start; leave {key} out, or "
            f"say after={word}, whatever its end"
        )
    return None if now.over else job_id


@cache
def _state(key: str, word: str, runs_dir: str) -> tuple[str, State]:
    """The job that `word` means, and how it is: asked once, for checking and for rendering."""
    from hpcinit.observe import find, state  # noqa: PLC0415 - psutil, only for those who wait for a job

    if JOB_ID.fullmatch(word):
        return word, state.of_job(word)
    try:
        path = find.find(word, Path(runs_dir).expanduser())
        record = state.submission(path)
        if record["engine"] != "slurm":
            raise RequestError(
                f"{path} runs without Slurm (engine: {record['engine']}): no job of Slurm's can wait for it"
            )
        now = state.read(path)
    except RequestError as error:
        raise RequestError(f"{key}={word}: {error}") from None
    return now.job_id if now.by_hand else state.jobs(record)[-1], now
