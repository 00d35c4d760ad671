"""What the queue holds of this user's, with the comment in which every submission of ours carries its token."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.facts import runfolder, slurm_client, slurm_records

MARK = "hpcinit="  # before a token, in a job's comment
ANSWER_S = 30  # longer than Slurm's MessageTimeout (10 s), after which its clients give up by themselves
LATE_S = 2  # then who waits is told what for
BETWEEN = "\x1f"  # unit separator: hpcinit lets no control character into a comment or a path
# %F: the id, of an array the whole array's. %k last: sites may put anything into a comment.
FORMAT = BETWEEN.join(("%F", "%T", "%o", "%k"))


@dataclass(frozen=True)
class Job:
    """state: Slurm's word. command: the script and its arguments. comment: with the token, or as the site left it."""

    job_id: str
    state: str
    command: str
    comment: str

    @property
    def folder(self) -> Path:
        """Its run folder, where the job is one of hpcinit's."""
        return Path(self.command.removesuffix(f"/{runfolder.SCRIPT}"))


class Question:
    """squeue, started at once and read when its answer is needed: meanwhile the caller has other work."""

    def __init__(self, env: Mapping[str, str], *, over: bool) -> None:
        """over: jobs that have ended too, for as long as the controller keeps them (MinJobAge)."""
        states = ["--states=all"] if over else []
        # --all: without it the user's own jobs in hidden partitions, or in those of a group, are not listed.
        command = ["squeue", "--all", "--me", "--noheader", *states, f"--format={FORMAT}"]
        try:
            self._process: subprocess.Popen[str] | None = slurm_client.start(command, env)
        except OSError:
            self._process = None

    def answer(self, late: Callable[[], None] = lambda: None) -> list[Job] | None:
        """The jobs; None if nobody answered, which does not mean that there are none. late: called if it takes long."""
        if self._process is None:
            return None
        try:
            out = self._process.communicate(timeout=LATE_S)[0]
        except subprocess.TimeoutExpired:
            late()
            try:
                out = self._process.communicate(timeout=ANSWER_S - LATE_S)[0]
            except subprocess.TimeoutExpired:
                self.drop()
                return None
        if self._process.returncode:
            return None
        return [Job(*fields) for line in out.splitlines() if len(fields := line.split(BETWEEN, 3)) == 4]

    def drop(self) -> None:
        """The answer is not needed after all."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def cluster(env: Mapping[str, str]) -> str:
    """Return the ClusterName of the controller that SLURM_CONF names; '' where it gives no answer."""
    try:
        done = slurm_client.run(["scontrol", "show", "config"], ANSWER_S, env)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return slurm_records.config(done.stdout).get("ClusterName", "")


def find(env: Mapping[str, str], token: str, script: Path, known: Sequence[str], alone: bool) -> list[Job] | None:
    """The jobs that carry `token`, ended ones too; none if there is certainly none; None if nobody answered.

    known: ids that sbatch gave for it. alone: no other job runs `script`, so that a job of it, without any token of
    ours because the site writes comments of its own, is the one.
    """
    jobs = Question(env, over=True).answer()
    if jobs is None:
        return None

    def ours(job: Job) -> bool:
        if f"{MARK}{token}" in job.comment:
            return True
        return MARK not in job.comment and job.command == str(script) and (alone or job.job_id in known)

    found = {job.job_id: job for job in jobs if ours(job)}  # an array's tasks are one job
    try:
        elsewhere = [job for job_id in known if (job := _by_id(env, job_id)) and ours(job)] if not found else []
    except _NoAnswer:
        return None
    return list(found.values()) or elsewhere or _in_accounting(env, token) or (_left_behind(script) if alone else [])


class _NoAnswer(Exception):
    """The controller did not say whether it knows the job."""


def _by_id(env: Mapping[str, str], job_id: str) -> Job | None:
    """Return the job that the controller knows by this id, whatever squeue lists; None if it knows none.

    A second opinion: a site's own squeue may be a wrapper that lists what it saw a minute ago. Raises _NoAnswer.
    """
    try:
        done = slurm_client.run(["scontrol", "--all", "show", "job", job_id], ANSWER_S, env)
    except OSError:  # no scontrol: squeue's answer has to do
        return None
    except subprocess.TimeoutExpired:
        raise _NoAnswer from None
    if done.returncode and "Invalid job id" not in done.stdout + done.stderr:
        raise _NoAnswer
    words = {key: value for line in done.stdout.splitlines() for key, _, value in [line.strip().partition("=")]}
    state = words.get("JobState", "").partition(" ")[0]
    return Job(job_id, state, words.get("Command", ""), words.get("Comment", "")) if state else None


def _in_accounting(env: Mapping[str, str], token: str) -> list[Job]:
    """For a job that has ended and is forgotten. sacct keeps the line that submitted it (Slurm >= 21.08)."""
    command = ["sacct", "-X", "--noheader", "--parsable2", "--starttime=now-1days", "--format=JobID,State,SubmitLine"]
    try:
        done = slurm_client.run(command, ANSWER_S, env)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:  # no accounting
        return []
    lines = [line.split("|", 2) for line in done.stdout.splitlines() if f"{MARK}{token}" in line]
    jobs = {line[0].partition("_")[0]: line[1] for line in lines if len(line) == 3}
    return [Job(job_id, state, "", f"{MARK}{token}") for job_id, state in jobs.items()]


def _left_behind(script: Path) -> list[Job]:
    """What the script itself wrote at its start: for a job that is forgotten, without accounting."""
    try:
        record = json.loads((script.parent / runfolder.EXIT).read_text())
    except (OSError, ValueError):
        return []
    job_id = str(record.get("job", "")) if isinstance(record, dict) else ""
    return [Job(job_id, "UNKNOWN", str(script), "")] if job_id else []
