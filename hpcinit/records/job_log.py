"""Parses Slurm's messages in logs/job.log: how the tasks of a job ended, in the order in which srun reported it.

tests/records/test_job_log.py contains lines that Slurm 22.05 printed. logs/job.log does not contain slurmstepd's
messages about a step. They are in the log of the node's first rank.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from hpcinit.base.errors import NodelistError
from hpcinit.base.text import MOST_RANKS
from hpcinit.slurm import nodelist

# srun: error: n2: tasks 2-3: Exited with exit code 1; the local engine prints the same with 'hpcinit: error: ...'. A
# task that starts the ranks of its node prints 'hpcinit: error: n2: rank 3: Killed', and 'hpcinit: n2: rank 3: Exited
# with exit code 0' for a rank that ended before another one failed.
_TASKS = re.compile(r"^(?:srun: error|hpcinit: error|hpcinit): (\S+): (task|rank)s? ([\d,\[\]-]+): (.+)$")
ABORTED = re.compile(r"Terminating StepId=|Job step aborted|forcing job termination|CANCELLED AT")
_END_OF_ABORTED = re.compile(r"Terminated|Killed")  # SIGTERM, and SIGKILL after KillWait
# The script of a heterogeneous job prints this first. srun numbers the tasks of each component from 0.
_COMPONENT = re.compile(r"^hpcinit: component \d+, ranks from (\d{1,7}): (\S+)$")
_LOST = re.compile(r"^srun: error: Node failure on (\S+)")
# srun: error: Task launch for StepId=5.0 failed on node n2: Communication connection failure
# 'Invalid job credential' and similar errors do not count, because the node is reachable.
_UNREACHABLE = re.compile(
    r"^srun: error: Task launch for \S+ failed on node (\S+): (?:Communication connection failure|Socket timed out)"
)
# Slurm also cancels a step after one of its tasks failed, but then prints no reason. Only Slurm 26.05 prints
# TASK FAILURE.
_CANCELLED = re.compile(
    r"\*\*\* (?:JOB (\S+) ON (\S+) CANCELLED AT (\S+)(?: DUE TO ([A-Z ]+))?"
    r"|STEP (\S+) ON (\S+) CANCELLED AT (\S+) DUE TO ([A-Z ]+))"
)
# Errors of srun, slurmctld, slurmd or the shell before any program runs.
_REFUSED = re.compile(
    r"^(?:srun: fatal: (.+)|srun: error: ((?:Task launch|Unable to (?:create|allocate|confirm)"
    r"|Invalid|Unsupported|Unrecognized|Requested|[Cc]annot|[Cc]ouldn't|MPI: ).+)"
    r"|s(?:batch|alloc): error: (.+)|slurmstepd\S*: error: ((?:execve\(\)|pyxis): .+)"
    r"|(\S+: line \d+: .+: (?:command not found|No such file or directory|Permission denied)))$"
)
_REASON = re.compile(r"(?i)no such file|not found|denied|unauthorized|no space left")
_BEFORE_PROGRAM = re.compile(r"^slurmstepd(?:-(\S+))?: error: (?:execve\(\)|pyxis): ")  # about a task that cannot start
# slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.
_OOM = re.compile(
    r"[Dd]etected \d+ oom[_-]kill event|: Out Of Memory$|exceeded memory limit \(\d+ > \d+\)"
    r"|[Oo]ut of memory: Kill(?:ed)? process \d+|oom-kill:constraint=|\bOOMKilled\b"  # of the kernel, and of Kubernetes
)
# The batch script, or the first torchrun agent, starts the line of a new attempt with this.
NEW_ATTEMPT = "new attempt: "
_OURS = re.compile(  # slurmstepd of Slurm 26.05 prints the time first
    r"^(?:srun|slurmstepd\S*): |^(?:\[[\dT:.-]+\] )?error: \*\*\* (?:JOB|STEP) \S+ ON "
)
_EXITED = re.compile(r"Exited with exit code (\d+)$")
_NODE_FAILURE = re.compile(r"(?i)node failure")


SUCCEEDED = "Exited with exit code 0"
CONSEQUENCES = ("code 134", "code 143")  # SIGABRT and SIGTERM, as a shell reports them


def how(code: int) -> str:
    """Return how a process ended, in the wording of srun.

    code: the exit status, or a negative signal number, such as -9 for SIGKILL.
    """
    if code >= 0:
        return f"Exited with exit code {code}"
    with contextlib.suppress(ValueError):  # there is no such signal
        return signal.strsignal(-code) or f"signal {-code}"
    return f"signal {-code}"


# 'Killed': 137. srun prints other ends as well, such as 'Out Of Memory'.
_STATUSES = {how(-number): 128 + number for number in signal.valid_signals()}


@dataclass(frozen=True)
class End:
    """A report that some tasks have ended.

    how: how they ended in the wording of srun, such as 'Exited with exit code 7' or 'Killed'.
    after_abort: whether the tasks ended only because Slurm had aborted the step.
    """

    host: str
    ranks: tuple[int, ...]
    how: str
    after_abort: bool

    @property
    def succeeded(self) -> bool:
        """Return whether these tasks succeeded. Such a report is from hpcinit, because srun reports only failures."""
        return self.how == SUCCEEDED

    @property
    def is_consequence(self) -> bool:
        """Return whether another failure may have ended these tasks, for example with SIGTERM or SIGABRT."""
        return self.after_abort or self.how.startswith(("Terminated", "Aborted")) or self.how.endswith(CONSEQUENCES)


@dataclass(frozen=True)
class Failure:
    """A failure in the log: srun reports that tasks failed, or Slurm reports that it ends the step.

    host: the node of the tasks, or '' if Slurm ends the step.
    status: the exit status, as a shell reports it.
    how: how the tasks ended, in the wording of srun.
    """

    host: str
    how: str
    status: int

    @property
    def terminated(self) -> bool:
        """Return whether Slurm or srun ended these tasks with SIGTERM."""
        return self.how == how(-signal.SIGTERM)

    @property
    def by_signal(self) -> bool:
        """Return whether a signal other than SIGTERM ended these tasks."""
        return not self.terminated and not self.how.startswith("Exited with")


@dataclass(frozen=True)
class Cancelled:
    """Slurm's message that it ended the job.

    why: 'TIME LIMIT', 'PREEMPTION', 'NODE FAILURE', or '' for any other reason.
    at: when Slurm ended the job, in seconds since 1970.
    """

    why: str
    host: str
    at: float | None


@dataclass(frozen=True)
class JobLog:
    """What Slurm printed in a job's log.

    output: the last lines that other programs printed.
    unreachable: the nodes on which srun could not start a task.
    refused: why Slurm did not start the program, or ''.
    not_started: the tasks that slurmstepd could not start.
    """

    ends: tuple[End, ...] = ()
    lost: tuple[str, ...] = ()
    cancelled: Cancelled | None = None
    oom: str = ""
    output: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    refused: str = ""
    not_started: tuple[End, ...] = ()


def read(text: str, ranks_per_task: int = 1) -> JobLog:
    """Return Slurm's messages about the last attempt from the text of logs/job.log.

    All attempts, and all jobs of a chain, write to the same log.

    ranks_per_task: how many ranks each task starts. If a task printed how its ranks ended, skip srun's message about
        this task.
    """
    lines = text.splitlines()
    starts = [number + 1 for number, line in enumerate(lines) if line.startswith(f"hpcinit: {NEW_ATTEMPT}")]
    lines = lines[max(starts, default=0) :]
    ends, lost, unreachable, aborted, cancelled = [], [], [], False, None
    named: set[str] = set()  # hosts whose task printed how its ranks ended
    firsts: dict[str, int] = {}  # for each host, the first rank of its component
    before_abort: list[End] = []  # what srun listed before Slurm ended the step
    for line in lines:
        aborted = aborted or bool(ABORTED.search(line))
        if found := _TASKS.match(line):
            how, numbers = found[4], _ranks(found[3])
            if not numbers:
                pass
            elif found[2] == "rank":
                named.add(found[1])
            elif found[1] in firsts:
                numbers = tuple(firsts[found[1]] + task for task in numbers)
            elif ranks_per_task > 1:
                numbers = tuple(task * ranks_per_task + each for task in numbers for each in range(ranks_per_task))
            if numbers is not None and (found[2] == "rank" or found[1] not in named):
                ends.append(End(found[1], numbers, how, aborted and bool(_END_OF_ABORTED.match(how))))
                before_abort += [] if aborted else ends[-1:]
        elif found := _COMPONENT.match(line):
            with contextlib.suppress(NodelistError):  # a program may print such a line too
                firsts.update(dict.fromkeys(nodelist.expand(found[2]), int(found[1])))
        elif found := _LOST.match(line):
            lost.append(found[1])
        elif found := _UNREACHABLE.match(line):
            unreachable.append(found[1])
        elif (found := _CANCELLED.search(line)) and cancelled is None:
            _, host, at, why = found.groups()[:4] if found[1] else found.groups()[4:]
            if (why or "").strip() != "TASK FAILURE":  # Slurm 26.05: srun ends the other tasks after a task failed
                cancelled = Cancelled((why or "").strip(), host, _time(at))
    known = (_OURS, _TASKS, _COMPONENT)
    output = [line for line in lines if line.strip() and not any(each.match(line) for each in known)]
    away = tuple(dict.fromkeys(unreachable))
    refusals = [next(filter(None, found.groups())) for line in lines if (found := _REFUSED.match(line))]
    refused = next((one for one in refusals if _REASON.search(one)), (refusals or [""])[0])
    without = tuple(_not_started(lines, ends, before_abort or ends[:1]))
    return JobLog(
        tuple(ends), tuple(dict.fromkeys(lost)), cancelled, oom(lines), tuple(output[-5:]), away, refused, without
    )


def _not_started(lines: Iterable[str], ends: Sequence[End], first: Sequence[End]) -> Iterator[End]:
    """Yield the reports on tasks that slurmstepd could not start.

    If slurmstepd names their nodes, yield all reports on these nodes. Otherwise, yield the reports in `first` that
    have the same exit status as the first report in it.

    first: what srun reported before Slurm ended the step, or only its first report.
    """
    hosts = [found[1] for line in lines if (found := _BEFORE_PROGRAM.match(line))]
    if hosts and any(hosts):
        yield from (end for end in ends if end.host in hosts)
    elif hosts:
        yield from (end for end in first if end.how == first[0].how and end.how.startswith("Exited with"))


def failures(lines: Iterable[str]) -> Iterator[Failure]:
    """Yield the failures that srun and Slurm reported, in the order of the log.

    The first failure is the cause. srun then terminates the other tasks, which report exit status 143 or 137.
    """
    for line in filter(is_from_slurm, lines):
        if found := _TASKS.match(line):
            how = found[4].removesuffix(" (core dumped)")
            exited = _EXITED.match(how)
            yield Failure(found[1], how, int(exited[1]) if exited else _STATUSES.get(how, 1))
        elif ABORTED.search(line):
            yield Failure("", "Terminated", 128 + signal.SIGTERM)


def node_failed(lines: Iterable[str]) -> bool:
    """Return whether Slurm reports a failed node.

    Examples are 'srun: error: Node failure on n2' and '... DUE TO NODE FAILURE ***'.
    """
    return any(_NODE_FAILURE.search(line) for line in lines if is_from_slurm(line))


def with_preemption(log: JobLog, at: str) -> JobLog:
    """Return the log with the preemption that scontrol reports, unless the log already shows how the job ended.

    With a grace time, SIGTERM ends the ranks before Slurm prints that it preempted the job.

    at: the time of the preemption, such as '2026-11-21T14:02:00', or ''.
    """
    return replace(log, cancelled=Cancelled("PREEMPTION", "", _time(at))) if at and not log.cancelled else log


def is_from_slurm(line: str) -> bool:
    """Return whether srun or slurmstepd printed this line."""
    return bool(_OURS.match(line))


def oom(lines: Iterable[str]) -> str:
    """Return the first line in which Slurm reports that the kernel killed a process because memory ran out, or ''."""
    return next((line.strip() for line in lines if _OOM.search(line)), "")


def _ranks(text: str) -> tuple[int, ...] | None:
    """Return the ranks in a text such as '0-3,8'. Return () for more than MOST_RANKS, and None for any other text.

    Another program may print a line that looks like Slurm's.
    """
    found: list[int] = []
    for part in text.strip("[]").split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return None
        if len(first) > 9 or len(last) > 9 or int(last or first) - int(first) + len(found) >= MOST_RANKS:
            return ()
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()  # no time zone is printed: use the login node's
    except ValueError:
        return None
