"""Reads from Slurm's accounting how much memory a job used."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from hpcinit.slurm import slurm_client

FIELDS = "--format=JobID,MaxRSS,MaxRSSNode,MaxRSSTask,ReqMem,NNodes,SubmitLine"
LIMIT = timedelta(seconds=15)  # a verdict without these numbers is better than a long wait


def describe(job_id: str, is_other: Callable[[str], bool]) -> str:
    """Return a sentence about the memory that a job used, or '' if Slurm's accounting has no record of it.

    An example is 'task 3 on n2 used up to 481 MB; the job requested 500 MB per node ...'. Slurm measures each task only
    now and then, by default every 30 s, so it misses short peaks.

    is_other: a function that returns whether a command line in the accounting belongs to another job. Slurm may reuse a
        job id.
    """
    command = ["sacct", "--noheader", "--parsable2", f"--jobs={job_id}", FIELDS, "--units=M"]
    try:
        output = slurm_client.run(command, at_most=LIMIT).stdout
    except slurm_client.Unreachable:
        return ""
    rows = [cells for line in output.splitlines() if len(cells := line.split("|", 6)) == 7]
    if any("." not in row[0] and is_other(row[6]) for row in rows):  # in the rows of steps, the command line is srun's
        return ""
    used = [(size, row) for row in rows if (size := _mb(row[1])) and "." in row[0]]
    if not used:
        return ""
    size, (_, _, node, task, *_) = max(used)
    # ReqMem is the total of the job's nodes since Slurm 21.08.
    requested = max(_mb(row[4]) / max(1, int(row[5] or 1)) for row in rows)
    asked = f"; the job requested {requested:.0f} MB per node" if requested else ""
    return f"Slurm's accounting: task {task} on {node} used up to {size:.0f} MB{asked} (short peaks are missing)"


def _mb(text: str) -> float:
    """Return the megabytes of '481.25M', or 0 for ''."""
    try:
        return float(text.removesuffix("M"))
    except ValueError:
        return 0.0
