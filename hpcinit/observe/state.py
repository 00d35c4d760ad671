"""Reads the states of runs from Slurm or the local engine. Both use Slurm's names for states."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.engine import ENGINES, SLURM, from_record
from hpcinit.engine.interface import NO_REPLY, State
from hpcinit.records import job_record
from hpcinit.records.job_record import JobRecord
from hpcinit.slurm import queue, slurm_client
from hpcinit.slurm.queue import JobQuery

__all__ = ["NO_REPLY", "State"]
FEW = 20  # for more runs, squeue starts before their folders are read


def read(path: Path) -> State:
    """Return the state of the run in `path`. Raise RequestError if `path` is not the run folder of a submitted job."""
    [state] = read_all([path])
    if isinstance(state, RequestError):
        raise state
    return state


def read_all(paths: Sequence[Path], early: queue.QueueQuery | None = None) -> list[State | RequestError]:
    """Return the state of each run, or its RequestError, in the order of `paths`. Slurm is queried once for all runs.

    early: a squeue process that is already running and lists all of the user's jobs, or None.
    """
    with slurm_client.on_cluster(None):
        # squeue runs while the folders are read.
        started = queue.QueueQuery("--me", ended=True) if early is None and len(paths) > FEW else None
    records: dict[str, list[JobRecord]] = {name: [] for name in ENGINES}  # by engine
    found: dict[Path, State | RequestError] = {}
    for path in paths:
        try:
            record = job_record.read(path)
            records[from_record(record.submission).name].append(record)
        except RequestError as error:
            found[path] = error
    if started and all(record.clusters for record in records[SLURM.name]):
        started.drop()
    for name, engine in ENGINES.items():
        states = engine.states(records[name], early or started)
        found.update(zip((record.path for record in records[name]), states, strict=True))
    return [found[path] for path in paths]


def foreign_job(job_id: str) -> queue.Job | None:
    """Return what Slurm reports about a job without a run folder.

    Return None if Slurm does not know the job or does not reply.
    """
    return queue.query([JobQuery([job_id], job_id)]).jobs.get(job_id) if shutil.which("squeue") else None
