"""Requeue and continue: the batch script itself, on the host and outside of any container, requeues its job.

The shell code is in lib/restarts.sh, reason.sh, spares.sh and requeue.sh.

Why so: docs/decisions/0018-requeue-from-the-batch-shell.md.
"""

from __future__ import annotations

from hpcinit.config.schema import Config

NEVER = 10**9  # restarts


def wanted(config: Config) -> bool:
    """Whether the batch script counts the restarts of its job, and requeues it."""
    return bool(config.restart.budget) and config.cluster.engine == "slurm"


def option(config: Config) -> dict[str, bool]:
    """For sbatch: whether the job may be requeued at all. As the site has it where nothing is asked."""
    spares = {"no-kill": True} if config.spares else {}  # the job goes on where a node is lost
    if config.restart.budget is None or config.cluster.engine != "slurm":
        return spares
    return {**spares, **({"requeue": True} if config.restart.budget else {"no-requeue": True})}
