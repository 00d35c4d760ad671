"""Requeue and chains: the batch script requeues its own job, on the host and outside of any container.

The shell code is in lib/restarts.sh, reason.sh, spare_nodes.sh and requeue.sh.

Why so: docs/decisions/0018-requeue-from-the-batch-shell.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcinit.base.errors import SubmitError
from hpcinit.config.schema import Config

NEVER = 10**9  # restarts


def wanted(config: Config) -> bool:
    """Whether the batch script counts the restarts of its job, and requeues it."""
    return bool(config.restart.max_restarts) and config.cluster.engine == "slurm"


def option(config: Config) -> dict[str, bool]:
    """For sbatch: whether the job may be requeued at all. As the site has it where nothing is asked."""
    spares = {"no-kill": True} if config.spare_nodes else {}  # the job goes on where a node is lost
    if config.restart.max_restarts is None or config.cluster.engine != "slurm":
        return spares
    return {**spares, **({"requeue": True} if config.restart.max_restarts else {"no-requeue": True})}


# A training longer than the time limit: one run folder, several jobs of the same script, each after the one before.
#
# Why so: docs/decisions/0017-chains.md.


@dataclass(frozen=True)
class Links:
    """jobs: their ids. command: that submitted the first. missing: why there are fewer than were asked for, else ''."""

    jobs: Sequence[str]
    command: Sequence[str]
    missing: str = ""


def hand_over(submit: Callable[..., tuple[str, Sequence[str]]], config: Config) -> Links:
    """Submit the jobs of a run. submit: takes options of sbatch, returns job id and command.

    Raises SubmitError if there is not even a first. Where a later one fails, the jobs before it are kept.
    """
    job_id, command = submit()
    jobs = [job_id]
    while len(jobs) < config.chain:
        try:
            # On sbatch's command line, where it takes the place of the script's own: the first alone waits for others.
            job_id, _ = submit(f"--dependency=afterany:{jobs[-1]}" + ",singleton" * config.singleton)
        except (Exception, KeyboardInterrupt) as error:  # the jobs before this one exist, whatever has happened
            said = error.problem if isinstance(error, SubmitError) else str(error)
            return Links(jobs, command, _missing(said or "interrupted", jobs, config.chain))
        jobs.append(job_id)
    return Links(jobs, command)


def _missing(said: str, jobs: Sequence[str], asked: int) -> str:
    return (
        f"job {len(jobs) + 1} of a chain of {asked}: {said}\n"
        f"those before it stay in the queue ({', '.join(jobs)}): the run begins, with fewer jobs than were asked for; "
        "hpcinit cancel takes them away"
    )
