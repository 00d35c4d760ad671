"""Queries Slurm for the states of jobs. Only this module parses squeue, sacct's job table and `scontrol show job`.

query() finds any number of jobs with one squeue, and if necessary one sacct and one scontrol.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import NamedTuple

from hpcinit.base import safe_files
from hpcinit.slurm import scontrol, slurm_client
from hpcinit.slurm.slurm_client import Call, NotStarted, Unreachable

MOST_COMPONENTS = 128  # of a heterogeneous job (MAX_HET_JOB_COMPS)
MOST = 5_000  # ids in one query, because an argument can have at most 128 KiB
UNKNOWN_JOB = re.compile(r"Invalid job id|\bJob \S+ not found")
PATIENCE, PATIENCE_KNOWN = timedelta(seconds=30), timedelta(seconds=5)  # for all commands of one query
LATE_S = 2.0  # the user gets a message if squeue takes longer
# States of a job that will not run again (squeue(1), JOB STATE CODES, 22.05 to 24.11), and of one that may run.
FINAL = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
    "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
}  # fmt: skip
OPEN = {
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "STOPPED",
    "REQUEUE_HOLD", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT", "RESV_DEL_HOLD", "POWER_UP_NODE", "EXPEDITING",
}  # fmt: skip
KNOWN = FINAL | OPEN | {"UNKNOWN"}
SEPARATOR = "\x1f"  # unit separator; hpcinit refuses control characters in comments and paths
# %k (the comment) last: sites may put anything into it.
FORMAT = SEPARATOR.join(("%i", "%T", "%S", "%M", "%L", "%r", "%o", "%k"))
LEADER = "+0"  # squeue and sacct write the first component of job 42 as 42+0, and sbatch prints 42
SACCT = ("sacct", "-X", "--noheader", "--parsable2")


class Job(NamedTuple):  # a frozen dataclass takes five times as long to make, and a sweep has a thousand jobs
    """One job, or one task of an array ('42_7'), as squeue, sacct or scontrol reports it.

    source: which of the three commands reported it.
    state: the state, as Slurm prints it.
    reason: why the job is waiting, or what ended it.
    exit_status: the exit status after the job's end, or None.
    start: when the job started or is expected to start, such as '2026-11-21T14:02:00' in this machine's time zone, or
        ''.
    elapsed_s, left_s: seconds since the job's start, and seconds until its time limit, or None if unknown.
    command: the script and its arguments. From sacct: the command line of sbatch.
    comment: the comment as submitted, or as the site changed it. From sacct: the command line of sbatch.
    """

    job_id: str
    state: str
    source: str
    reason: str = ""
    exit_status: int | None = None
    start: str = ""
    elapsed_s: int | None = None
    left_s: int | None = None
    command: str = ""
    comment: str = ""

    @property
    def over(self) -> bool:
        return self.state in FINAL

    @property
    def base_id(self) -> str:
        """Return the id of the whole job: '42' for the array task '42_7' and for the heterogeneous component '42+1'."""
        return re.split(r"[_+]", self.job_id, maxsplit=1)[0]


@dataclass(frozen=True)
class JobQuery:
    """The jobs of one run whose state is to be queried.

    jobs: all jobs of the run.
    last: the job to look up if none of them is in the queue.
    ended: whether the end of `last` is already recorded.
    """

    jobs: Sequence[str]
    last: str
    ended: bool = False


class Allocation(NamedTuple):
    """The nodes that Slurm assigned to a running job.

    job_id: the id that srun expects. An array task has its own id: '4243' for '4242_1'.
    nodelists: one nodelist per component of a heterogeneous job, otherwise one.
    """

    job_id: str
    nodelists: tuple[str, ...]


def allocation(job_id: str) -> Allocation | None:
    """Return the nodes that Slurm assigned to a job, or None if it has none.

    Raise Unreachable if Slurm does not reply.
    """
    form = SEPARATOR.join(("%i", "%A", "%N"))
    command = ("squeue", "--noheader", "--all", "--array", f"--jobs={job_id}", f"--format={form}")
    rows = [line.strip().split(SEPARATOR) for line in slurm_client.run(command).stdout.splitlines()]
    found = sorted((int(own.partition("+")[2] or 0), job, nodes) for own, job, nodes in rows if nodes)
    return Allocation(found[0][1], tuple(nodes for _, _, nodes in found)) if found else None


@dataclass(frozen=True)
class SlurmReply:
    """What Slurm replied to a query.

    jobs: the jobs that Slurm knows, by job id.
    unreachable: why the controller did not reply, or ''.
    """

    jobs: Mapping[str, Job] = field(default_factory=dict)
    unreachable: str = ""


class QueueQuery:
    """A running squeue command. The caller can do other work until it calls jobs()."""

    def __init__(self, which: str, *, ended: bool, arrays: bool = True, env: Mapping[str, str] | None = None) -> None:
        """Start squeue.

        which: the squeue option that selects jobs: --me, or --jobs=ID.
        ended: whether to also list jobs that ended less than MinJobAge (300 s) ago.
        arrays: whether to list each task of an array. Otherwise, squeue lists an array once per state.
        """
        # --all includes partitions that are hidden or belong to another group.
        flags = [*(["--array"] if arrays else []), *(["--states=all"] if ended else [])]
        self._command = ("squeue", "--noheader", "--all", which, *flags, f"--format={FORMAT}")
        self._call = _start(self._command, env)
        self._jobs: list[Job] | Unreachable | None = None

    def jobs(self, late: Callable[[], None] | None = None, at_most: timedelta | None = None) -> list[Job]:
        """Wait for squeue and return the jobs. Raise Unreachable if Slurm does not reply.

        late: a function that is called if squeue takes longer than LATE_S seconds.
        at_most: the timeout.
        """
        if self._jobs is None:
            self._jobs = self._read(late, at_most)
        if isinstance(self._jobs, Unreachable):
            raise self._jobs
        return self._jobs

    def _read(self, late: Callable[[], None] | None, at_most: timedelta | None) -> list[Job] | Unreachable:
        if late is not None and isinstance(self._call, Call) and not self._call.ends_within(LATE_S):
            late()
        try:
            lines = _lines(self._command, self._call, at_most)
        except Unreachable as error:
            return error
        return [_of_squeue(line) for line in lines if line.count(SEPARATOR) >= 7]

    def drop(self) -> None:
        """Kill squeue, because its output is not needed."""
        if isinstance(self._call, Call):
            self._call.drop()


def query(queries: Collection[JobQuery], early: QueueQuery | None = None) -> SlurmReply:
    """Return the states of jobs, from at most three commands: squeue, sacct and scontrol.

    sacct may reply even if the controller is down. Together the commands take at most PATIENCE, or PATIENCE_KNOWN if
    the end of every job is already recorded.

    early: a squeue that has already been started.
    """
    ids = {job for one in queries for job in (*one.jobs, one.last)}
    if not ids:
        return SlurmReply()
    found: dict[str, Job] = {}
    unreachable = ""
    ends = time.monotonic() + (PATIENCE_KNOWN if all(one.ended for one in queries) else PATIENCE).total_seconds()

    def left() -> timedelta:
        return timedelta(seconds=max(ends - time.monotonic(), 0.1))

    try:
        found = {job.job_id: job for job in (early or _query_of(ids)).jobs(at_most=left())}
    except Unreachable as error:
        unreachable = str(error)
    open_ = {job_id for job_id, job in found.items() if not job.over}
    missing = {one.last: one for one in queries if one.last not in found and not open_.intersection(one.jobs)}
    try:
        accounted = {job.job_id: job for job in _accounted(missing, left())}
        # A query for a whole array matches its tasks too.
        found |= {job_id: job for job_id, job in accounted.items() if missing.keys() & {job_id, job.base_id}}
    except Unreachable as error:
        unreachable = unreachable or str(error)
    rest = [job_id for job_id, one in missing.items() if not one.ended and not (job_id in found and found[job_id].over)]
    if rest and not unreachable:
        try:
            found |= {job.job_id: job for job in show(rest, at_most=left()) if job.job_id in rest}
        except Unreachable as error:
            unreachable = str(error)
    return SlurmReply(found, unreachable)


def show(ids: Sequence[str], env: Mapping[str, str] | None = None, at_most: timedelta | None = None) -> list[Job]:
    """Return the jobs that `scontrol show job` prints, of any user.

    With one id, return only that job, or nothing if Slurm does not know it. With several ids, return all jobs that the
    controller remembers. Raise Unreachable if Slurm does not reply.
    """
    command = ("scontrol", "--all", "show", "job", *(ids if len(ids) == 1 else ()))
    text = "\n".join(_lines(command, _start(command, env), at_most))
    return [_of_scontrol(record) for record in scontrol.records(text, "JobId") if "JobState" in record]


def has_ended(job_id: str, at_most: timedelta) -> bool | None:
    """Return whether a job has ended, including all its components or array tasks.

    Return None if Slurm does not know the job.

    Only a final state proves that a job has ended. A missing job may still run: squeue omits jobs in hidden
    partitions, and a site may cache squeue's output. Raise Unreachable if Slurm does not reply.

    at_most: the timeout of each of the two commands.
    """
    shown = slurm_client.run(("scontrol", "--all", "show", "job", job_id), at_most=at_most)
    found = scontrol.records(shown.stdout, "JobId")
    if found:
        # scontrol ends each record with an empty line.
        if shown.status != 0 or not shown.stdout.endswith("\n\n") or not _is_complete(job_id, found):
            raise Unreachable(f"scontrol returned an incomplete answer for job {job_id}")
        return all(record.get("JobState") in FINAL for record in found)
    if not UNKNOWN_JOB.search(shown.stdout + shown.stderr):  # an empty output is not an answer
        raise Unreachable(f"scontrol: {shown.stderr.strip()}")
    with suppress(NotStarted):
        rows = slurm_client.run((*SACCT, f"--jobs={job_id}", "--format=State%40"), at_most=at_most)
        # 'CANCELLED by 1000'. Without accounting sacct fails.
        states = [row.split()[0] for row in rows.stdout.splitlines() if row.split()] if rows.status == 0 else []
        return all(state in FINAL for state in states) if states else None
    return None


def _is_complete(job_id: str, found: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the records include all components of the job '42', or the component '42+1'."""
    leader, _, offset = job_id.partition("+")
    if offset:
        return any((one.get("HetJobId"), one.get("HetJobOffset")) == (leader, offset) for one in found)
    ids = {int(one["JobId"]) for one in found if one["JobId"].isdigit()}
    wanted = {int(job_id)}
    for one in found:
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", one.get("HetJobIdSet", "")):  # 42-44,47
            wanted.update(range(int(first), min(int(last or first), int(first) + MOST_COMPONENTS) + 1))
    return wanted <= ids


def accounting(
    arguments: Iterable[str], columns: int, env: Mapping[str, str] | None = None, at_most: timedelta | None = None
) -> list[list[str]]:
    """Return the rows that sacct prints, one per job, each with `columns` cells. Without accounting, return no rows.

    Raise Unreachable if Slurm does not reply.
    """
    command = (*SACCT, *arguments)
    rows = [line.split("|", columns - 1) for line in _lines(command, _start(command, env), at_most)]
    return [row for row in rows if len(row) == columns]


def status_of(code: str) -> int | None:
    """Convert sacct's ExitCode to an exit status: '3:0' is 3, and '0:9' (signal 9) is 137.

    If `code` contains no status, return None.
    """
    status, _, number = code.partition(":")
    return int(status) or (128 + int(number) if int(number or 0) else 0) if status.isdigit() else None


@cache
def seconds(text: str) -> int | None:
    """Convert a time that Slurm prints ('1-02:03:04', '2:03:04', '3:04' or '4') to seconds.

    For 'UNLIMITED', 'INVALID' and 'NOT_SET', return None.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if not match:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _query_of(ids: Collection[str]) -> QueueQuery:
    """Start squeue for the jobs with these ids.

    For one job, list only that job, of any user. For several, list all jobs of this user, because with --jobs=1,2
    squeue would fetch the jobs of all users.
    """
    jobs = {job_id.partition("_")[0] for job_id in ids}
    return QueueQuery(f"--jobs={jobs.pop()}" if len(jobs) == 1 else "--me", ended=True)


def _of_squeue(line: str) -> Job:
    job_id, state, start, elapsed, left, reason, command, comment = line.split(SEPARATOR, 7)
    # A job that was canceled while it waited keeps the reason why it waited.
    reason = "" if reason == "None" or state == "CANCELLED" else reason
    start = "" if start in ("N/A", "Unknown") else start
    left_s = None if state in FINAL else seconds(left)
    job_id = job_id.removesuffix(LEADER)
    return Job(job_id, state, "squeue", reason, None, start, seconds(elapsed), left_s, command, comment)


def _accounted(ids: Iterable[str], at_most: timedelta | None = None) -> list[Job]:
    """Return the jobs with these ids from accounting, however old they are."""
    bases, found = sorted({job_id.partition("_")[0] for job_id in ids}), []
    for at in range(0, len(bases), MOST):
        which = f"--jobs={','.join(bases[at : at + MOST])}"
        for row in accounting(
            [which, "--format=JobID%40,State%40,ExitCode,Start,ElapsedRaw,SubmitLine"], 6, at_most=at_most
        ):
            job_id, about, code, start, elapsed, line = row
            state, *reason = about.split() or ["UNKNOWN"]  # 'CANCELLED by 1000'
            start = "" if start in ("Unknown", "None") else start
            status = _exit_status(state, code)
            job_id = job_id.removesuffix(LEADER)
            its = Job(job_id, state, "sacct", _with_user_name(reason), status, start, seconds(elapsed))
            found.append(its._replace(command=line, comment=line))
    return found


def _with_user_name(reason: Sequence[str]) -> str:
    """Return what sacct prints after the state, with the name of the user: 'by ada' for ['by', '1000'].

    If the user is unknown, return 'by user 1000'.
    """
    with suppress(IndexError, ValueError):
        return f"{reason[0]} {safe_files.user(int(reason[1]))}"
    return " ".join(reason)


def _of_scontrol(record: Mapping[str, str]) -> Job:
    array = record.get("ArrayJobId")
    job_id = f"{array}_{record.get('ArrayTaskId', '')}" if array else record["JobId"]
    reason = "" if record.get("Reason", "None") == "None" else record["Reason"]
    status = _exit_status(record["JobState"], record.get("ExitCode", ""))
    command, comment = record.get("Command", ""), record.get("Comment", "")
    return Job(job_id, record["JobState"], "scontrol", reason, status, command=command, comment=comment)


def _exit_status(state: str, code: str) -> int | None:
    """Return the exit status, or None if the job has not ended or was canceled while waiting.

    For a job that was canceled while waiting, Slurm prints '0:0'.
    """
    status = status_of(code)
    return status if state in FINAL and (status or state == "COMPLETED") else None


def _start(command: Sequence[str], env: Mapping[str, str] | None) -> Call | NotStarted:
    try:
        return slurm_client.start(command, env)
    except NotStarted as error:
        return error  # raised when the output is needed


def _lines(command: Sequence[str], call: Call | NotStarted, at_most: timedelta | None = None) -> list[str]:
    """Return the lines that the command prints.

    Return no lines if Slurm does not know the job, or has no accounting. Raise Unreachable if Slurm does not reply.
    """
    if isinstance(call, NotStarted):
        if command[0] == "sacct":
            return []
        raise call
    try:
        output = call.output(at_most)
    except slurm_client.TimedOut as error:
        raise slurm_client.TimedOut(f"{error}: {slurm_client.CHECK}") from None
    if output.status == 0:
        return output.stdout.splitlines()
    # Without accounting, sacct fails at once. For a purged job, Slurm prints 'Invalid job id specified'. For an array's
    # task, scontrol prints 'Job 18_2 not found': on stdout, and since Slurm 26.05 on stderr.
    if command[0] == "sacct" or UNKNOWN_JOB.search(output.stdout + output.stderr):
        return []
    raise Unreachable(f"{command[0]}: {output.stderr.strip().splitlines()[-1] if output.stderr.strip() else 'failed'}")
