"""What Slurm says of jobs, whatever their number: from one squeue, then one sacct, then one scontrol."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hpcinit.facts import slurm_client

ANSWER_S = 30  # longer than Slurm's MessageTimeout (10 s), after which its clients give up by themselves
NOBODY = "nobody"  # the source of a state when Slurm did not answer
FEW = 20  # of more runs at once squeue is asked before their folders are read
MOST = 5_000  # ids in one question: an argument may have 128 KiB
# Slurm's words for a job that will not run again (squeue(1), JOB STATE CODES, 22.05 to 24.11), and for one that may.
FINAL = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
    "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
}  # fmt: skip
OPEN = {
    "PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "STOPPED",
    "REQUEUE_HOLD", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT", "RESV_DEL_HOLD", "POWER_UP_NODE", "EXPEDITING",
}  # fmt: skip
KNOWN = FINAL | OPEN | {"UNKNOWN"}
FORMAT = "%i|%T|%S|%M|%L|%r"
SCONTROL = re.compile(
    r"JobId=(?P<job>\d+)(?: ArrayJobId=(?P<array>\d+))?(?: ArrayTaskId=(?P<task>\S+))?.* JobState=(?P<name>\w+) "
    r"Reason=(?P<reason>.*?) Dependency=.* ExitCode=(?P<code>\d+:\d+)"
)


@dataclass(frozen=True)
class State:
    """name: Slurm's word (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ...), or UNKNOWN.

    reason: why it waits or what ended it, as Slurm says. exit_status: once it has ended and is known.
    source: who told. by_hand: of the run's last attempt, which somebody started with the script, not hpcinit.
    link: 'job 2 of a chain of 5', or ''. others: jobs of the chain that are still in the queue beside this one.
    restart: number of the attempt that this job began last, as it says itself; None before its first.
    away: whether the controller gave no answer when it was asked.
    start: when it began or, as Slurm estimates, will, in this machine's time ('2026-11-21T14:02:00'), or ''.
    elapsed_s, left_s: since it began and until its time limit, in seconds; None where nobody says.
    """

    name: str
    job_id: str
    engine: str
    reason: str = ""
    exit_status: int | None = None
    source: str = ""
    by_hand: bool = False
    link: str = ""
    others: tuple[str, ...] = ()
    start: str = ""
    elapsed_s: int | None = None
    left_s: int | None = None
    restart: int | None = None
    away: bool = False

    @property
    def over(self) -> bool:
        return self.name in FINAL

    @property
    def again(self) -> bool:
        """Waits for another attempt, after one that has ended; it may not have left its nodes yet."""
        requeued = self.name == "PENDING" or (self.name == "COMPLETING" and self.reason == "BeginTime")
        return requeued and self.restart is not None

    @property
    def strange(self) -> bool:
        """A word that this version does not know."""
        return self.name not in KNOWN

    @property
    def forgotten(self) -> bool:
        """Slurm has answered, and knows nothing of the job, which left no word of its end either."""
        return self.name == "UNKNOWN" and self.source == ""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self)}


@dataclass(frozen=True)
class Wanted:
    """jobs: all of a run. last: the one that matters once none is in the queue. ended: it left a record of its end."""

    jobs: Sequence[str]
    last: str
    ended: bool = False


@dataclass(frozen=True)
class Answer:
    """said: by the job's id. silent: why the controller was not heard, or ''."""

    said: Mapping[str, State] = field(default_factory=dict)
    silent: str = ""


class NoAnswer(Exception):
    """Slurm did not say anything about the job, not even that it does not know it."""


def ask(wanted: Collection[Wanted], early: Question | None = None) -> Answer:
    """Three questions at most. sacct may answer while the controller is away. early: squeue, asked already."""
    ids = {job for want in wanted for job in (*want.jobs, want.last)}
    if not ids:
        if early:
            early.drop()
        return Answer()
    said, silent = {}, ""
    try:
        said = {state.job_id: state for state in _squeue(early or _question(ids))}
    except NoAnswer as error:
        silent = str(error)
    going = {job for job, state in said.items() if not state.over}
    missing = {want.last: want for want in wanted if want.last not in said and not going.intersection(want.jobs)}
    try:
        accounts = {state.job_id: state for state in _sacct(missing)}
        # Of an array that is asked for as a whole, its tasks.
        said |= {job: now for job, now in accounts.items() if missing.keys() & {job, job.partition("_")[0]}}
    except NoAnswer as error:
        silent = silent or str(error)
    rest = [job for job, want in missing.items() if not want.ended and not (job in said and said[job].over)]
    if rest and not silent:
        try:
            said |= {state.job_id: state for state in _scontrol(rest) if state.job_id in rest}
        except NoAnswer as error:
            silent = str(error)
    return Answer(said, silent)


def _question(ids: Collection[str]) -> Question:
    """Of one job whosever it is, of several all of this user's: with --jobs=1,2 squeue fetches the whole cluster's."""
    jobs = {job.partition("_")[0] for job in ids}
    return Question(f"--jobs={jobs.pop()}" if len(jobs) == 1 else "--me")


def _squeue(question: Question) -> Iterator[State]:
    """Of each job that is in the queue, or has left it not long ago."""
    for line in question.answer():
        if line.count("|") < 5:  # a heading
            continue
        job_id, name, start, elapsed, left, reason = line.split("|", 5)
        # A job that was cancelled while it waited keeps the reason why it waited.
        reason = "" if reason == "None" or name == "CANCELLED" else reason
        start = "" if start in ("N/A", "Unknown") else start
        if name in FINAL:
            left = ""
        yield State(
            name, job_id, "slurm", reason, None, "squeue", False, "", (), start, seconds(elapsed), seconds(left)
        )


def _sacct(ids: Iterable[str]) -> Iterator[State]:
    """Whatever age they have. Nothing without accounting."""
    jobs = sorted({job.partition("_")[0] for job in ids})
    for at in range(0, len(jobs), MOST):
        which = f"--jobs={','.join(jobs[at : at + MOST])}"
        columns = "--format=JobID%40,State%40,ExitCode,Start,ElapsedRaw"
        for line in ask_slurm("sacct", "--noheader", "--parsable2", "-X", which, columns):
            job_id, name, code, start, elapsed = line.split("|", 4)
            words = name.split() or ["UNKNOWN"]  # 'CANCELLED by 1000'
            start = "" if start in ("Unknown", "None") else start
            now = State(words[0], job_id, "slurm", " ".join(words[1:]), None, "sacct", start=start)
            yield State(**{**vars(now), "exit_status": _ended_with(words[0], code), "elapsed_s": seconds(elapsed)})


def _scontrol(ids: Sequence[str]) -> Iterator[State]:
    """Other users' jobs as well, with exit status; all that the controller holds if it is asked for several."""
    for line in ask_slurm("scontrol", "--all", "--oneliner", "show", "job", *(ids if len(ids) == 1 else ())):
        if match := SCONTROL.match(line):
            job_id = f"{match['array']}_{match['task']}" if match["array"] else match["job"]
            reason = "" if match["reason"] == "None" else match["reason"]
            status = _ended_with(match["name"], match["code"])
            yield State(match["name"], job_id, "slurm", reason, status, "scontrol")


class Question:
    """squeue, started at once: whoever asks has other work meanwhile. which: --me, or --jobs=ID."""

    def __init__(self, which: str) -> None:
        # --states=all: jobs that have ended stay for MinJobAge (300 s). --all: also partitions hidden from the user.
        self._command = ("squeue", "--noheader", "--all", "--array", which, "--states=all", f"--format={FORMAT}")
        self._process = _start(self._command)

    def answer(self) -> list[str]:
        """Its lines. Raises NoAnswer."""
        return _answer(self._command, self._process)

    def drop(self) -> None:
        """Nobody wants to know any more."""
        if self._process:
            self._process.kill()
            self._process.communicate()


def _ended_with(name: str, code: str) -> int | None:
    """None while it has not; and of a job that was cancelled while it waited, which Slurm gives '0:0'."""
    status = status_of(code)
    return status if name in FINAL and (status or name == "COMPLETED") else None


def status_of(code: str) -> int | None:
    """The exit status of sacct's ExitCode: '3:0' is 3, '0:9' (a signal) 137; None where it does not say."""
    status, _, number = code.partition(":")
    return int(status) or (128 + int(number) if int(number or 0) else 0) if status.isdigit() else None


@cache
def seconds(text: str) -> int | None:
    """Of '1-02:03:04', '2:03:04', '3:04' or '4'; None for 'UNLIMITED', 'INVALID', 'NOT_SET'."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if not match:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def ask_slurm(*command: str) -> list[str]:
    """The answer's lines; none if there is no such job, or no accounting. Raises NoAnswer if nobody answers."""
    return _answer(command, _start(command))


def _start(command: Sequence[str]) -> subprocess.Popen[str] | None:
    """None where there is no such program."""
    try:
        return subprocess.Popen(
            command, env=slurm_client.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
    except OSError:
        return None


def _answer(command: Sequence[str], process: subprocess.Popen[str] | None) -> list[str]:
    if process is None:
        if command[0] == "sacct":
            return []
        raise NoAnswer(f"{command[0]} is not on PATH")
    try:
        out, err = process.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise NoAnswer(
            f"{command[0]} did not answer in {ANSWER_S} s: is SLURM_CONF right, is the controller up?"
        ) from None
    if process.returncode == 0:
        return out.splitlines()
    # Without accounting sacct fails at once, and says so; a forgotten job is 'Invalid job id specified'.
    # Of a task of an array scontrol says 'Job 18_2 not found', on stdout.
    unknown = "Invalid job id" in err or (command[0] == "scontrol" and "not found" in out)
    if command[0] == "sacct" or unknown:
        return []
    raise NoAnswer(f"{command[0]}: {err.strip().splitlines()[-1] if err.strip() else 'failed'}")
