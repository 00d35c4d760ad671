"""Lines as squeue prints them for hpcinit, for tests with a stand-in for squeue."""

from __future__ import annotations

from hpcinit.slurm.queue import SEPARATOR


def squeue_line(job_id: str, state: str, elapsed: str = "0:10", left: str = "INVALID", comment: str = "(null)") -> str:
    """Return the line of one job, with the columns of hpcinit.slurm.queue.FORMAT."""
    return SEPARATOR.join((job_id, state, "N/A", elapsed, left, "None", "/runs/x/job.sh", comment))
