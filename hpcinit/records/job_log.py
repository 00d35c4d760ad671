"""What logs/job.log holds of Slurm's own words: how tasks ended, in the order in which srun heard of it.

Lines recorded with Slurm 22.05 stand in tests/records/test_job_log.py. slurmstepd's words about a step go to the log of
a node's first rank instead.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

# srun: error: n2: tasks 2-3: Exited with exit code 1; the local engine says the same as 'hpcinit: error: ...', and of a
# rank of its own the one task of a node 'hpcinit: error: n2: rank 3: Killed'.
_TASKS = re.compile(r"^(?:srun|hpcinit): error: (\S+): (task|rank)s? ([\d,\[\]-]+): (.+)$")
_TO_END = re.compile(r"Terminating StepId=|Job step aborted|forcing job termination|CANCELLED AT")
_OF_THE_END = re.compile(r"Terminated|Killed")  # SIGTERM, and SIGKILL after KillWait
_LOST = re.compile(r"^srun: error: Node failure on (\S+)")
# srun: error: Task launch for StepId=5.0 failed on node n2: Communication connection failure
# Not 'Invalid job credential' and the like: a node that says so is there.
_UNREACHABLE = re.compile(
    r"^srun: error: Task launch for \S+ failed on node (\S+): (?:Communication connection failure|Socket timed out)"
)
_CANCELLED = re.compile(r"\*\*\* JOB (\S+) ON (\S+) CANCELLED AT (\S+)(?: DUE TO ([A-Z ]+))?")
# slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.
_OOM = re.compile(r"[Dd]etected \d+ oom[_-]kill event|: Out Of Memory$")
_BEGINS = re.compile(
    r"^hpcinit: (?:job \S+ of a chain begins$|(?:elastic )?restart \d+ (?:of at most \d+ )?of job \S+ begins on "
    r"|\w+ on .+: the ranks begin again in the same job, without )"
)
_REFUSED = re.compile(r"^hpcinit: restart \d+ \(slurm\) is not begun: ")  # by an attempt that ends with it
_OURS = re.compile(r"^(srun|slurmstepd\S*): ")


def how(code: int) -> str:
    """srun's words for the end of a process, for those in its place. code: -9 for a signal, as subprocess has it."""
    return f"Exited with exit code {code}" if code >= 0 else signal.strsignal(-code) or f"signal {-code}"


@dataclass(frozen=True)
class End:
    """how: 'Exited with exit code 7', 'Killed', 'Segmentation fault', ... told: after the step had been told to end."""

    host: str
    ranks: tuple[int, ...]
    how: str
    told: bool


@dataclass(frozen=True)
class Cancelled:
    """why: '', 'TIME LIMIT', 'PREEMPTION', 'NODE FAILURE'. at: seconds since 1970; None: not readable."""

    why: str
    host: str
    at: float | None


@dataclass(frozen=True)
class JobLog:
    """said: the last lines that are not Slurm's. unreachable: nodes on which no step could be started."""

    ends: tuple[End, ...] = ()
    lost: tuple[str, ...] = ()
    cancelled: Cancelled | None = None
    oom: str = ""
    said: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()


def read(text: str, ranks_per_task: int = 1) -> JobLog:
    """Of the last attempt: the jobs of a chain, and a job that is requeued, write one after the other.

    ranks_per_task: of srun's tasks, where one starts the ranks of its node; what it says of them itself comes first.
    """
    lines = text.splitlines()
    begins = [number + 1 for number, line in enumerate(lines) if _BEGINS.match(line)]
    begins += [number for number, line in enumerate(lines) if _REFUSED.match(line)]
    lines = lines[max(begins, default=0) :]
    ends, lost, unreachable, told, cancelled = [], [], [], False, None
    named: set[str] = set()  # hosts whose task has said of its ranks how they ended
    for line in lines:
        told = told or bool(_TO_END.search(line))
        if found := _TASKS.match(line):
            how, numbers = found[4], _ranks(found[3])
            if found[2] == "rank":
                named.add(found[1])
            elif ranks_per_task > 1:
                numbers = tuple(task * ranks_per_task + each for task in numbers for each in range(ranks_per_task))
            if found[2] == "rank" or found[1] not in named:
                ends.append(End(found[1], numbers, how, told and bool(_OF_THE_END.match(how))))
        elif found := _LOST.match(line):
            lost.append(found[1])
        elif found := _UNREACHABLE.match(line):
            unreachable.append(found[1])
        elif (found := _CANCELLED.search(line)) and cancelled is None:
            cancelled = Cancelled((found[4] or "").strip(), found[2], _time(found[3]))
    said = [line for line in lines if line.strip() and not _OURS.match(line) and not _TASKS.match(line)]
    away = tuple(dict.fromkeys(unreachable))
    return JobLog(tuple(ends), tuple(dict.fromkeys(lost)), cancelled, oom(lines), tuple(said[-5:]), away)


def oom(lines: Iterable[str]) -> str:
    """The first line in which Slurm says that the kernel has killed for memory, or ''."""
    return next((line.strip() for line in lines if _OOM.search(line)), "")


def _ranks(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.strip("[]").split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()  # no zone: the cluster's, which is the login node's too
    except ValueError:
        return None
