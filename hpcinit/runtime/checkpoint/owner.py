"""Which job may publish checkpoints in a folder: FOLDER/.owner.json names it.

1. A job becomes the owner when it saves into the folder for the first time. A requeued or restarted job also becomes
    the owner when it loads, so that an old attempt that wakes up later cannot publish a step.
2. An earlier attempt of the owner's job never becomes the owner. Slurm's restart count and step id order attempts.
3. Of two different jobs, the owner is the one whose first save started later. The job before it may still run: a shared
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
# World.job of a Slurm step: '4242.0.1' is job, step and restart; '4242.0e2.1' is the second restart inside the step.
_SLURM = re.compile(r"(?P<id>\d+(?:\+\d+)?)\.(?P<step>\d+|batch)(?:e(?P<start>\d+))?\.(?P<restart>\d+)")


@dataclass(frozen=True)
class Owner:
    """The job whose rank 0 is process `pid` of `host`.

    job: World.job. token: random, unique to this process and job. since: seconds since 1970. timeout_s: the longest
    time that a save of this job waits for one of its ranks.
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
        """Return the id of the Slurm job, or '' for another launcher."""
        found = _SLURM.fullmatch(self.job)
        return found["id"] if found else ""

    @property
    def attempt(self) -> tuple[int, int, int]:
        """Return the sort key of the attempts of one Slurm job: restart, step, restart inside the step."""
        found = _SLURM.fullmatch(self.job)
        if found is None:
            return 0, 0, 0
        step = -1 if found["step"] == "batch" else int(found["step"])
        return int(found["restart"]), step, int(found["start"] or 0)

    def is_same_job(self, other: Owner) -> bool:
        return bool(self.slurm_id) and self.slurm_id == other.slurm_id


def of_this_process(job: str, timeout_s: float) -> Owner:
    """Return this process as an owner. Only `since` and `timeout_s` differ between calls."""
    return Owner(job, socket.gethostname(), os.getpid(), _token(os.getpid(), job), time.time(), timeout_s)


@cache
def _token(pid: int, job: str) -> str:
    return secrets.token_hex(4)


def read(path: Path) -> Owner | None:
    """Return the owner that the file names, or None if the file is missing or invalid."""
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def claim(folder: Path, mine: Owner) -> Owner | None:
    """Make `mine` the owner of the folder, if it was not before. Return the other job that owned it, or None.

    Raise RequestError if another job or a later attempt has taken the folder over, OSError if writing fails.
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
    """Make `mine` the owner if an earlier attempt of the same job owns the folder; return whether it did.

    Other jobs may load without becoming the owner, for example an evaluation. Raise RequestError like claim(), and
    OSError.
    """
    found = read(folder / CLAIM)
    if found is None or not found.is_same_job(mine):
        return False
    # Another step of the same attempt may be an evaluation that runs at the same time.
    restarted = mine.attempt[0] > found.attempt[0] or (
        mine.attempt[:2] == found.attempt[:2] and mine.attempt[2] > found.attempt[2]
    )
    if restarted:
        claim(folder, mine)
    return restarted


def taken_by(folder: Path, mine: Owner) -> Owner | None:
    """Return the owner that has taken the folder over from `mine`, or None."""
    found = read(folder / CLAIM)
    return None if found is None or found.token == mine.token else found


def lost(folder: Path, mine: Owner, winner: Owner) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(winner.since))
    if winner.is_same_job(mine):
        why = "a later attempt of this job has started, so this attempt must exit"
    else:
        why = "only one job can save into a folder; cancel one of them, or give it another folder"
    return (
        f"{winner} has taken over {folder} at {at} from {mine}, so nothing was saved: {why}. If {winner} has ended and "
        f"you do not need its checkpoints, remove {folder / CLAIM}"
    )


def write(path: Path, owner: Owner) -> None:
    """Write the file atomically. Raise OSError."""
    temporary = path.with_name(f".owner-{owner.token}.tmp")
    temporary.write_text(json.dumps(asdict(owner)) + "\n")
    temporary.replace(path)


def is_dead(owner: Owner, mine: Owner, untouched_s: float) -> bool:
    """Return whether no process can still write the unfinished folder of `owner`.

    untouched_s: seconds since the last change there. If neither Slurm's ids nor this host's processes show that the
    owner has ended, it counts as dead when `untouched_s` is longer than its own timeout.
    """
    if owner.token == mine.token or (owner.is_same_job(mine) and owner.attempt <= mine.attempt):
        return True
    if owner.host == mine.host and not Path(f"/proc/{owner.pid}").exists():
        return True
    return untouched_s > owner.timeout_s


def _may_take(folder: Path, mine: Owner, found: Owner) -> bool:
    if (folder.absolute(), mine.token) in state.claimed:
        return False  # `mine` owned it before, and `found` has taken it over
    return not (found.is_same_job(mine) and found.attempt > mine.attempt)
