"""Determines which job may publish checkpoints in a folder. FOLDER/.owner.json names that job, the owner.

1. A job becomes the owner with its first save into the folder. A requeued or restarted job already becomes the owner
    when it loads. An older attempt that was suspended can then no longer publish a checkpoint.
2. An earlier attempt of the owner's job never becomes the owner. The restart count and step id show which is earlier.
3. If two different jobs save into the folder, the one that starts saving later becomes the owner. The other one may
    still be running, but a shared folder cannot show that.
4. A job that is no longer the owner publishes nothing. Its save raises RequestError, which names the new owner.

Even if two jobs write at the same time, no complete checkpoint is lost: a checkpoint is published by one rename, which
never replaces a complete one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

from hpcinit.base import processes
from hpcinit.base.errors import RequestError
from hpcinit.records import run_folder
from hpcinit.runtime.process_state import state
from hpcinit.slurm import queue
from hpcinit.slurm.slurm_client import NotStarted, Unreachable

CLAIM = ".owner.json"
SLURM_TIMEOUT = timedelta(seconds=10)  # per command; a job that takes over a folder waits for two commands
# World.job of a Slurm step: '4242.0.1' is job, step and restart; '4242.0e2.1' is the second restart inside the step.
_SLURM = re.compile(r"(?P<id>\d+(?:\+\d+)?)\.(?P<step>\d+|batch)(?:e(?P<start>\d+))?\.(?P<restart>\d+)")


@dataclass(frozen=True, kw_only=True)
class Owner(processes.Process):
    """A job that publishes checkpoints. It is identified by its rank 0.

    job: the value of World.job.
    cluster: Slurm's name of the cluster that assigned the job id, or '' without Slurm.
    run: the run folder, or '' without one. It is needed because Slurm reuses job ids after it loses its state.
    token: random, unique to this process and job.
    since: seconds since 1970.
    """

    job: str
    cluster: str = ""
    run: str = ""
    token: str
    since: float

    def __str__(self) -> str:
        found = _SLURM.fullmatch(self.job)
        if found is None:
            return f"process {self.pid} on {self.host}"
        return f"job {found['id']} (restart {found['restart']}, step {found['step']}) on {self.host}"

    @property
    def slurm_id(self) -> str:
        """Return the id of the Slurm job, or '' if another launcher started the job."""
        found = _SLURM.fullmatch(self.job)
        return found["id"] if found else ""

    @property
    def attempt(self) -> tuple[int, int, int]:
        """Return a sort key that orders the attempts of one Slurm job: restart, step, restart inside the step."""
        found = _SLURM.fullmatch(self.job)
        if found is None:
            return 0, 0, 0
        step = -1 if found["step"] == "batch" else int(found["step"])
        return int(found["restart"]), step, int(found["start"] or 0)

    def is_same_job(self, other: Owner) -> bool:
        mine, its = ((one.cluster, one.slurm_id, one.run) for one in (self, other))
        return bool(self.slurm_id) and mine == its

    def is_restart_of(self, other: Owner) -> bool:
        """Return whether this job is a later attempt of `other`, restarted by Slurm or by the job's agents.

        Another Slurm step of the same attempt, such as an evaluation, is no restart, because both may run at the same
        time.
        """
        mine, before = self.attempt, other.attempt
        return self.is_same_job(other) and (mine[0] > before[0] or (mine[:2] == before[:2] and mine[2] > before[2]))


def of_this_process(job: str) -> Owner:
    """Return the Owner for this process. Later calls return the same values, except for `since`."""
    me = processes.identity()
    cluster, run = (os.environ.get(name, "") for name in ("SLURM_CLUSTER_NAME", run_folder.ENV_FOLDER))
    return Owner(**me, job=job, cluster=cluster, run=run, token=_token(me["pid"], job), since=time.time())


@cache
def _token(pid: int, job: str) -> str:
    return secrets.token_hex(4)


def read(path: Path) -> Owner | None:
    """Return the owner that the file names, or None if the file is missing or invalid."""
    try:
        return run_folder.from_known_fields(Owner, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def claim(folder: Path, mine: Owner) -> Owner | None:
    """Make `mine` the owner of the folder, if it is not the owner yet.

    Return the job that was the owner before, or None.

    Raise RequestError if another job or a later attempt has become the owner since, and OSError if writing fails.
    """
    found = read(folder / CLAIM)
    if found is not None and found.token == mine.token:
        return None
    if found is not None and not _may_take(folder, mine, found):
        raise RequestError(lost(folder, mine, found))
    write(folder / CLAIM, mine)
    state.claimed.add((folder.absolute(), mine.token))
    return None if found is None or found.is_same_job(mine) else found


def claim_after_restart(folder: Path, mine: Owner) -> bool:
    """If an earlier attempt of the same job owns the folder, make `mine` the owner and return True, else return False.

    Other jobs, such as an evaluation, may load without becoming the owner. Raise RequestError if another job or a later
    attempt has become the owner in the meantime, and OSError if writing fails.
    """
    found = read(folder / CLAIM)
    if found is None or not mine.is_restart_of(found):
        return False
    claim(folder, mine)
    return True


def taken_by(folder: Path, mine: Owner) -> Owner | None:
    """Return the job that has become the owner of the folder instead of `mine`, or None."""
    found = read(folder / CLAIM)
    return None if found is None or found.token == mine.token else found


def lost(folder: Path, mine: Owner, winner: Owner) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(winner.since))
    if winner.is_same_job(mine):
        why = "a later attempt of this job has started, so this attempt must exit"
    else:
        why = "only one job can save into a folder; cancel one of them, or give it another folder"
    return (
        f"{winner} has taken over {folder} from {mine} at {at}, so nothing was saved: {why}. If {winner} has ended and "
        f"you do not need its checkpoints, remove {folder / CLAIM}"
    )


def write(path: Path, owner: Owner) -> None:
    """Write the owner to the file atomically. Raise OSError if that fails."""
    temporary = path.with_name(f".owner-{owner.token}.tmp")
    temporary.write_text(json.dumps(asdict(owner)) + "\n")
    temporary.replace(path)


def has_ended(owner: Owner, mine: Owner) -> bool | None:
    """Return True if `owner` has certainly ended, False if it is still running, and None if that is unknown.

    A job has ended if this job is its restart, if its rank 0 was a process of this node that is gone, or if Slurm
    reports its end. Old files prove nothing, because rank 0 may be suspended.
    """
    if owner.token == mine.token or mine.is_restart_of(owner):
        return True
    ended = owner.has_ended()
    if ended is None and owner.slurm_id and owner.cluster and owner.cluster == mine.cluster:
        with suppress(NotStarted, Unreachable):
            ended = queue.has_ended(owner.slurm_id, SLURM_TIMEOUT)
    return ended


def _may_take(folder: Path, mine: Owner, found: Owner) -> bool:
    if (folder.absolute(), mine.token) in state.claimed:
        return False  # `mine` was the owner before, and `found` has taken over the folder
    return not (found.is_same_job(mine) and found.attempt > mine.attempt)
