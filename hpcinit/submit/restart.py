"""Renders the parts of a batch script that requeue the job, and submits chains of jobs.

To requeue its own job, the batch script calls hpcinit/after on the host, outside any container. The reasons are in
docs/decisions/0214-one-end-of-job.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcinit.base.errors import SubmitError
from hpcinit.checks import dependency
from hpcinit.config.schema import Config


def wanted(config: Config) -> bool:
    """Return whether the batch script should be able to requeue its own job."""
    return bool(config.restart.max_restarts) and config.engine.has_queue


def policy(config: Config) -> list[str]:
    """Return the settings that hpcinit.after needs, as command-line arguments."""
    limits = {
        "on": ":".join(config.restart.on),
        "max_restarts": config.restart.max_restarts or 0,
        "without_progress": config.restart.without_progress,
        "nodes": config.nodes if config.spare_nodes else 0,
    }
    known = limits if config.restart.max_restarts or config.spare_nodes else {"max_restarts": 0}
    return [f"{key}={value}" for key, value in known.items() if value is not None]


def option(config: Config) -> dict[str, bool]:
    """Return sbatch's --requeue or --no-requeue, and --no-kill for a job with spare nodes.

    Without restart.max_restarts, the site's default for requeues applies.
    """
    spares = {"no-kill": True} if config.spare_nodes else {}  # the job continues after it lost a node
    if config.restart.max_restarts is None or not config.engine.has_queue:
        return spares
    return {**spares, **({"requeue": True} if config.restart.max_restarts else {"no-requeue": True})}


# Chains, for training runs longer than the time limit: one run folder, and several jobs of the same script. Each starts
# after the previous one. The reasons are in docs/decisions/0017-chains.md.


@dataclass(frozen=True)
class Links:
    """The jobs of a chain.

    jobs: their job ids.
    command: the sbatch command that submitted the first job.
    missing: why there are fewer jobs than requested, or ''.
    """

    jobs: Sequence[str]
    command: Sequence[str]
    missing: str = ""


def hand_over(submit: Callable[..., tuple[str, Sequence[str]]], config: Config) -> Links:
    """Submit the job or the chain of jobs of a run.

    Raise SubmitError if the first job cannot be submitted. If a later one cannot, keep the jobs before it.

    submit: a function that takes options for sbatch, and returns the job id and the command.
    """
    job_id, command = submit()
    jobs = [job_id]
    while len(jobs) < config.chain:
        try:
            # An option on the command line replaces the script's own dependency, which is for the first job only.
            job_id, _ = submit(f"--dependency=afterany:{jobs[-1]}" + ",singleton" * dependency.has_singleton(config))
        except (Exception, KeyboardInterrupt) as error:  # the earlier jobs of the chain exist in any case
            reason = error.problem if isinstance(error, SubmitError) else str(error)
            return Links(jobs, command, _missing(reason or "interrupted", jobs, config.chain))
        jobs.append(job_id)
    return Links(jobs, command)


def _missing(reason: str, jobs: Sequence[str], requested: int) -> str:
    return (
        f"job {len(jobs) + 1} of a chain of {requested} was not submitted: {reason}\n"
        f"the jobs before it stay in the queue ({', '.join(jobs)}), so the run starts with fewer jobs than requested; "
        "to cancel them use hpcinit cancel"
    )
