"""Decides what to do after the ranks of a job have ended, and does it. The batch script runs this module:

    python -m hpcinit.after STATUS KEY=VALUE...      after srun ended with STATUS
    python -m hpcinit.after restarted KEY=VALUE...   before the ranks of a job that Slurm or hpcinit requeued

It prints its decision to stdout, as one line for the batch script (submit/lib/after.sh): WHAT STATUS NODES. It
does not use its exit status for this, because a rank may end with any exit status. Messages go to stderr, which is the
job's log.

This module opens as few files as possible. On a slow shared file system, each file takes 50 ms, and after a preemption,
the job may have only 30 s left.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcinit.after import decisions, facts
from hpcinit.after.decisions import Facts, Policy
from hpcinit.after.facts import Job
from hpcinit.base.console import say
from hpcinit.records import elastic_restarts, job_log, requeues, run_folder, stop_reasons
from hpcinit.records.requeues import Restart
from hpcinit.slurm import slurm_client
from hpcinit.slurm.slurm_client import Unreachable

RESTARTED = "restarted"  # instead of STATUS
# What the batch script does next.
START = "start"  # start the ranks
AGAIN = "again"  # start the ranks again, without NODES
REQUEUED = "requeued"  # wait until Slurm ends the script
CONTINUE = "continue"  # end with STATUS; the next job of the chain runs
END = "end"  # end with STATUS; the chain is over

TRIES, PAUSE_S = 6, 10.0  # number of tries of scontrol requeue, and the pause between them
SIGTERM_S = 1.0  # a SIGTERM for the job may reach the batch script this much later than the ranks


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Print what the batch script must do next.

    If this function itself fails, it prints END, so that nothing is restarted. The batch script then exits with srun's
    status, or with 1 if the argument is 'restarted'.

    argv: srun's exit status or 'restarted', then KEY=VALUE arguments.
    """
    what, given = argv[0], dict(pair.partition("=")[::2] for pair in argv[1:])
    policy = Policy(
        on=frozenset(filter(None, given.get("on", "").split(":"))),
        max_restarts=int(given.get("max_restarts", 0)),
        without_progress=int(given["without_progress"]) if "without_progress" in given else None,
        nodes=int(given.get("nodes", 0)),
    )
    folder, number = Path(env[run_folder.ENV_FOLDER]), env["SLURM_JOB_ID"]
    attempt = int(env.get("SLURM_RESTART_COUNT") or 0)
    excluded = filter(None, given.get("excluded", "").split(","))
    job = Job(
        folder=folder,
        name=given["job"],
        number=number,
        attempt=attempt,
        nodelist=env.get("SLURM_JOB_NODELIST", ""),
        nodes=int(env.get("SLURM_JOB_NUM_NODES") or 0),
        job_from=int(given.get("job_from") or 0),
        from_=int(given.get("from") or 0),
        # Also exclude nodes that failed, even if they work again: Slurm has removed them from the job.
        excluded=tuple(dict.fromkeys([*excluded, *elastic_restarts.lost_nodes(folder, number, attempt)])),
    )
    try:
        print(restarted(job, policy) if what == RESTARTED else ended(job, policy, int(what)))
    except Exception as error:  # exit with 0, so that the batch script does not repeat this with another Python
        say(f"error: hpcinit.after failed, so the job does not restart: {error!r}")
        print(END, 1 if what == RESTARTED else what)
    return 0


def ended(job: Job, policy: Policy, status: int) -> str:
    """Decide what to do after the ranks have ended, and do it. Return the decision, as one line for the batch script.

    status: srun's exit status.
    """
    found = facts.gather(job, status, bool(policy.max_restarts or policy.nodes))
    status = decisions.own_status(found)
    why = decisions.reason(found, status)
    if why in policy.on and (policy.max_restarts or policy.nodes) and _still_runs(job):
        if policy.nodes and (excluded := _exclude(job, policy, found, why)):
            return f"{AGAIN} {status} {excluded}"
        if policy.max_restarts:
            if _counted(job, policy, job.attempt + 1, why, _last_restart(job)) and _requeued(job, policy, why):
                return f"{REQUEUED} {status}"
            status = status or 1
    continues = decisions.chain_continues(found, status)
    if not status and found.stop == stop_reasons.NOT_RECORDED:
        say(f"warning: job {job.number} of this chain stopped early and recorded no reason. Was the disk full?")
    return f"{CONTINUE if continues else END} {status}"


def restarted(job: Job, policy: Policy) -> str:
    """Return 'start', or 'end 1' if a limit forbids this restart.

    Also record the restart, unless the previous attempt has already done so.
    """
    last = _last_restart(job)
    counted = last is not None and (last.job, last.restart) == (job.name, job.attempt)
    return START if counted or _counted(job, policy, job.attempt, run_folder.SLURM, last) else f"{END} 1"


def _still_runs(job: Job) -> bool:
    time.sleep(SIGTERM_S)
    return facts.is_running(job.name)


def _exclude(job: Job, policy: Policy, found: Facts, why: str) -> str:
    """Return the nodes that a restart inside this job must avoid, separated by commas.

    Return '' if the ranks cannot restart on other nodes, for example because no spare node is left.
    """
    bad = decisions.nodes_at_fault(found, why) if why in decisions.REPLACED else []
    if not bad:
        return ""
    excluded, names = ",".join([*job.excluded, *bad]), ", ".join(bad)
    if job.nodes - len(excluded.split(",")) < policy.nodes:
        say(f"{why} on {names}, and no spare node is left")
        return ""
    say(f"{job_log.NEW_ATTEMPT}{why} on {names}: restarting the ranks in the same job, without {excluded}")
    for name in (run_folder.ERRORS, run_folder.HANG_REPORTS, run_folder.UNUSABLE):
        _set_aside(job.folder / name, job.number)
    return excluded


def _set_aside(folder: Path, number: str) -> None:
    """Move the records of the ranks that have ended into the subfolder `before-JOB`.

    number: the job's SLURM_JOB_ID.
    """
    aside = folder / f"{elastic_restarts.ASIDE}{number}"
    for path in [*folder.glob("rank-*.json"), *folder.glob(f"{number}.*")]:
        with suppress(OSError):
            aside.mkdir(exist_ok=True)
            path.replace(aside / path.name)


def _last_restart(job: Job) -> Restart | None:
    found = requeues.read(job.folder)
    return found[-1] if found else None


def _counted(job: Job, policy: Policy, number: int, why: str, last: Restart | None) -> bool:
    """Return whether the limits allow restart `number`. If so, record it.

    last: the previous restart, or None.
    """
    step = elastic_restarts.furthest(job.folder)
    furthest, idle = decisions.progress(last, step if step >= 0 else None)
    limited = bool(policy.max_restarts)
    if limited and (refused := decisions.refusal(policy, number, furthest, idle)):
        say(f"no restart {number} ({why}): {refused}")
        return False
    most = policy.max_restarts if limited else None
    try:
        requeues.append(job.folder, Restart(job.name, number, int(time.time()), why, furthest, idle, most))
    except OSError as error:
        # A full disk must not end the job. The limit is checked with SLURM_RESTART_COUNT, not with these records.
        say(f"warning: cannot record restart {number} ({why}) in {job.folder / run_folder.RESTARTS}: {error.strerror}")
    return True


def _requeued(job: Job, policy: Policy, why: str) -> bool:
    """Requeue the job with scontrol. Return whether Slurm accepted."""
    say(f"job {job.name} is requeued ({why}): restart {job.attempt + 1} of at most {policy.max_restarts}")
    for number in range(1, TRIES + 1):
        try:
            done = slurm_client.run(["scontrol", "requeue", job.name])
            if done.status == 0:
                return True
            problem = done.error
        except Unreachable as error:
            problem = str(error)
        say(f"scontrol requeue failed (try {number} of {TRIES}): {problem}")
        if number < TRIES:
            time.sleep(PAUSE_S)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
