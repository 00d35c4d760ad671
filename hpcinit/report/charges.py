"""Reads from sacct what Slurm charged for jobs. Only sacct has one record for each requeue of a job."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from hpcinit.report.ledger import Allocation
from hpcinit.slurm import queue
from hpcinit.slurm.slurm_client import Unreachable

FIELDS = ("JobID", "State", "Submit", "Start", "End", "ElapsedRaw", "NNodes", "AllocTRES", "ReqTRES", "NodeList")
GPUS = re.compile(r"(?:^|,)gres/gpu(:[^=,]+)?=(\d+)")
# Why Slurm ended an allocation, by its state in sacct. For other states, hpcinit's records contain the reason.
REASONS = {
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node_fail",
    "TIMEOUT": "time_limit",
    "REQUEUED": "slurm",
    "CANCELLED": "canceled",
    "OUT_OF_MEMORY": "failure",
    "FAILED": "failure",
    "BOOT_FAIL": "node_fail",
}


def query(arguments: Iterable[str]) -> list[Allocation]:
    """Return the allocations that sacct lists with these arguments, in the order of their starts.

    Without accounting, or if Slurm does not reply, return []. The components of a heterogeneous job count as one
    allocation.
    """
    rows: list[list[str]] = []
    with suppress(Unreachable):
        rows = queue.accounting(["--duplicates", *arguments, f"--format={','.join(FIELDS)}"], len(FIELDS))
    found: dict[tuple[str, float], Allocation] = {}
    ended: dict[str, float] = {}
    restarts: dict[str, int] = {}
    for one in sorted(filter(None, map(_allocation, rows)), key=lambda one: one.begin):
        job = one.job.partition("+")[0]
        if (first := found.get((job, one.begin))) is not None:  # another component of a heterogeneous job
            units, gpus = first.units + one.units, first.gpus + one.gpus
            found[job, one.begin] = replace(first, units=units, gpus=gpus, nodes=first.nodes + one.nodes)
            continue
        queued_s = one.queued_s
        if job in ended and queued_s is not None:  # after a requeue, sacct may repeat the first submission time
            queued_s = min(queued_s, max(0.0, one.begin - ended[job]))
        restarts[job] = restarts.get(job, -1) + 1
        ended[job] = one.end
        found[job, one.begin] = replace(one, job=job, restart=restarts[job], queued_s=queued_s)
    return list(found.values())


def of_jobs(jobs: Sequence[str]) -> list[Allocation]:
    """Return the allocations of the jobs with these ids, from sacct."""
    found: list[Allocation] = []
    for at in range(0, len(jobs), queue.MOST):
        found += query([f"--jobs={','.join(jobs[at : at + queue.MOST])}"])
    return found


def _allocation(row: Sequence[str]) -> Allocation | None:
    """Return the allocation in one row of sacct's output, or None if the job has not started."""
    cell = dict(zip(FIELDS, row, strict=True))
    begin, end, submitted = (seconds_of(cell[name]) for name in ("Start", "End", "Submit"))
    state = cell["State"].partition(" ")[0]
    if begin is None or not cell["ElapsedRaw"].isdigit():
        return None
    # Slurm does not charge suspended time, so the charged time may be shorter than the time from start to end.
    if end is None and state not in ("RUNNING", "SUSPENDED", "COMPLETING"):
        end = begin + int(cell["ElapsedRaw"])
    end = max(begin, end if end is not None else time.time())
    gpus = gpus_of(cell["AllocTRES"])
    nodes = int(cell["NNodes"]) if cell["NNodes"].isdigit() else 1
    queued_s = None if submitted is None else max(0.0, begin - submitted)
    reason = REASONS.get(state, "")
    suspended_s = max(0.0, end - begin - int(cell["ElapsedRaw"])) if state not in ("RUNNING", "COMPLETING") else 0.0
    return Allocation(
        cell["JobID"], 0, begin, end, float(gpus or nodes), gpus, nodes, queued_s, state, reason,
        suspended_s=suspended_s if suspended_s > 1 else 0.0,
    )  # fmt: skip


def gpus_of(tres: str) -> int:
    """Return the number of GPUs in a text such as 'cpu=8,gres/gpu:a100=4,gres/gpu=4'.

    If there is an entry without a type, it already includes the GPUs of all types.
    """
    found = [(kind, int(number)) for kind, number in GPUS.findall(tres)]
    whole = [number for kind, number in found if not kind]
    return whole[0] if whole else sum(number for _, number in found)


def seconds_of(text: str) -> float | None:
    """Convert a time such as '2026-11-21T14:02:11', in this machine's time zone, to seconds since 1970.

    If the text is not a time, return None.
    """
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
