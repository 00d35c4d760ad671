"""Makes tokens and finds jobs by their token. hpcinit adds a token to the comment of each job that it submits."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcinit.slurm import queue
from hpcinit.slurm.queue import Job, QueueQuery
from hpcinit.slurm.slurm_client import NotStarted, Unreachable

MARK = "hpcinit="  # before a token, in a job's comment


def new(request: str = "") -> str:
    """Return a new token for one submission: 12 hexadecimal digits that identify the request, and 8 random ones."""
    return f"{request[:12] or 'x'}-{secrets.token_hex(4)}"


def is_other(comment: str, command: str, known: Sequence[str], script: str) -> bool:
    """Return whether a job that has our job's id is certainly a different job.

    Slurm reuses job ids after its controller has lost its saved state.

    comment, command: the job's comment and command, as Slurm reports them.
    known: the tokens of our jobs, or [] if unknown.
    script: the script that we submitted, or '' if the job may run any script.
    """
    if MARK in comment:
        return bool(known) and not any(f"{MARK}{token}" in comment for token in known)
    return bool(command) and not command.endswith(script)  # a site may replace comments


def own_jobs(env: Mapping[str, str], *, ended: bool) -> QueueQuery:
    """Start squeue for this user's jobs, with one entry per array.

    ended: whether to also list jobs that ended less than MinJobAge seconds ago.
    """
    return QueueQuery("--me", ended=ended, arrays=False, env=env)


def find(
    env: Mapping[str, str],
    token: str,
    script: Path,
    known: Sequence[str],
    alone: bool,
    started: Callable[[], str] = lambda: "",
) -> list[Job] | None:
    """Return the jobs that have `token`, including ended ones.

    If there certainly is no such job, return []. If Slurm does not reply, return None.

    known: the job ids that sbatch printed.
    alone: whether only one job may run `script`. Then the script identifies it, even if the site changed its comment.
    started: a function that returns the job id that the batch script recorded when it started, or ''.
    """
    try:
        jobs = own_jobs(env, ended=True).jobs()
    except Unreachable:
        return None

    def ours(job: Job) -> bool:
        if f"{MARK}{token}" in job.comment:
            return True
        return MARK not in job.comment and job.command == str(script) and (alone or job.base_id in known)

    found = {job.base_id: job for job in jobs if ours(job)}  # the tasks of an array are one job
    if found:
        return list(found.values())
    try:
        # The controller is queried directly too: a site's squeue may be a wrapper with a cache.
        elsewhere = [job for job_id in known for job in queue.show([job_id], env) if ours(job)]
    except NotStarted:  # no scontrol
        elsewhere = []
    except Unreachable:
        return None
    return elsewhere or _in_accounting(env, token) or (_by_record(script, started()) if alone else [])


def _in_accounting(env: Mapping[str, str], token: str) -> list[Job]:
    """Return ended jobs that have `token`, from sacct. The controller may have purged them.

    sacct shows the sbatch command of each job since Slurm 21.08.
    """
    try:
        rows = queue.accounting(["--starttime=now-1days", "--format=JobID,State,SubmitLine"], 3, env)
    except Unreachable:
        return []
    jobs = {row[0].partition("_")[0]: row[1] for row in rows if f"{MARK}{token}" in row[2]}
    return [Job(job_id, state, "sacct", comment=f"{MARK}{token}") for job_id, state in jobs.items()]


def _by_record(script: Path, job_id: str) -> list[Job]:
    """Return the job with the id that the batch script recorded, or [] if there is no id.

    Call this only if the controller has purged the job and Slurm has no accounting.
    """
    return [Job(job_id, "UNKNOWN", "", command=str(script))] if job_id else []
