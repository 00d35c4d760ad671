"""Which job may publish checkpoints in a folder: FOLDER/.owner.json names it.

1. A job becomes the owner when it saves into the folder for the first time. A requeued or restarted job also becomes
   it when it loads, so that an old attempt that wakes up later cannot publish a step beside it.
2. An earlier attempt of the owner's job never becomes the owner. Slurm's restart count and step id order attempts.
3. Of two different jobs, the owner is the one whose first save began later. The job before it may still run: a shared
   folder cannot show that.
4. A job that has lost the folder publishes nothing more. Its save raises RequestError, which names the new owner.

The file prevents confusion, not races: a step is published by one rename that never replaces another whole step.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.rendezvous.process_state import state

CLAIM = ".owner.json"
# World.job of a Slurm step: '4242.0.1' is job, step and restart; '4242.0e2.1' the second restart inside the step.
_SLURM = re.compile(r"(?P<id>\d+(?:\+\d+)?)\.(?P<step>\d+|batch)(?:e(?P<start>\d+))?\.(?P<restart>\d+)")


@dataclass(frozen=True)
class Owner:
    """The job whose rank 0 is process `pid` of `host`.

    job: World.job. token: random, of this process and job alone. since: seconds since 1970. timeout_s: the longest
    that a save of this job waits for one of its ranks.
    """

    job: str
    host: str
    pid: int
    token: str
    since: float
    timeout_s: float

    def __str__(self) -> str:
        found = _SLURM.fullmatch(self.job)
        if found is None:
            return f"process {self.pid} on {self.host}"
        return f"job {found['id']} (restart {found['restart']}, step {found['step']}) on {self.host}"

    @property
    def slurm_id(self) -> str:
        """Return the id of the Slurm job, '' for a job of another launcher."""
        found = _SLURM.fullmatch(self.job)
        return found["id"] if found else ""

    @property
    def attempt(self) -> tuple[int, int, int]:
        """Return what orders the attempts of one Slurm job: restart, step, restart inside the step."""
        found = _SLURM.fullmatch(self.job)
        if found is None:
            return 0, 0, 0
        step = -1 if found["step"] == "batch" else int(found["step"])
        return int(found["restart"]), step, int(found["start"] or 0)

    def is_same_job(self, other: Owner) -> bool:
        return bool(self.slurm_id) and self.slurm_id == other.slurm_id


def of_this_process(job: str, timeout_s: float) -> Owner:
    """Return what this process is as an owner, the same each time but for `since` and `timeout_s`."""
    return Owner(job, socket.gethostname(), os.getpid(), _token(os.getpid(), job), time.time(), timeout_s)


@cache
def _token(pid: int, job: str) -> str:
    return secrets.token_hex(4)


def read(path: Path) -> Owner | None:
    """Return the owner that the file names, None if there is no such file or it is not readable as one."""
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def claim(folder: Path, mine: Owner) -> Owner | None:
    """Make `mine` the owner of the folder if it has not been so before. Return the other job that it was taken from.

    Raise RequestError if another job or a later attempt has taken the folder over, OSError if it cannot be written.
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
    """Make `mine` the owner if an attempt of the same job before it owns the folder; return whether it did.

    Anything else that loads may only read, as an evaluation does. Raise RequestError as claim() does, OSError.
    """
    found = read(folder / CLAIM)
    if found is None or not found.is_same_job(mine):
        return False
    # Another step of the same attempt may be an evaluation beside the training.
    restarted = mine.attempt[0] > found.attempt[0] or (
        mine.attempt[:2] == found.attempt[:2] and mine.attempt[2] > found.attempt[2]
    )
    if restarted:
        claim(folder, mine)
    return restarted


def taken_by(folder: Path, mine: Owner) -> Owner | None:
    """Return the owner that has taken the folder over from `mine`, None if none has."""
    found = read(folder / CLAIM)
    return None if found is None or found.token == mine.token else found


def lost(folder: Path, mine: Owner, winner: Owner) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(winner.since))
    if winner.is_same_job(mine):
        why = "a later attempt of this job has started, so this attempt must end"
    else:
        why = "only one job can save into a folder: end one of them, or give it another folder"
    return (
        f"{winner} has taken over {folder} at {at}, and this is {mine}: {why}. If that job has ended and is not "
        f"wanted, remove {folder / CLAIM}"
    )


def write(path: Path, owner: Owner) -> None:
    """Raise OSError. Another process sees the whole file or the one before."""
    temporary = path.with_name(f".owner-{owner.token}.tmp")
    temporary.write_text(json.dumps(asdict(owner)) + "\n")
    temporary.replace(path)


def is_dead(owner: Owner, mine: Owner, untouched_s: float) -> bool:
    """Return whether nothing can still write the unfinished folder of `owner`.

    untouched_s: how long ago something last changed there. Where neither Slurm's numbers nor this host's processes
    show that the owner has ended, it is dead once that is longer than its own timeout.
    """
    if owner.token == mine.token or (owner.is_same_job(mine) and owner.attempt <= mine.attempt):
        return True
    if owner.host == mine.host and not Path(f"/proc/{owner.pid}").exists():
        return True
    return untouched_s > owner.timeout_s


def _may_take(folder: Path, mine: Owner, found: Owner) -> bool:
    if (folder.absolute(), mine.token) in state.claimed:
        return False  # it was ours, and `found` has taken it since
    return not (found.is_same_job(mine) and found.attempt > mine.attempt)
