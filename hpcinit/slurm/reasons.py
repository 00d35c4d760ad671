"""Explains why a job is waiting, given the reason that Slurm reports, and what the user can do about it."""

from __future__ import annotations

import re
from functools import cache

LESS = "it will never start: cancel it and request less, or use another partition"
OTHERS = "it will start when other jobs under the same limit have ended"
# Reasons of squeue(1), JOB REASON CODES, in Slurm 22.05 to 24.11; the first match counts.
MEANINGS = (
    (r"PartitionNodeLimit", f"it requests more nodes than the partition allows, or the nodes are down; {LESS}"),
    (r"PartitionTimeLimit", f"its time limit exceeds the partition's; {LESS}"),
    (r"PartitionConfig", f"it requests more nodes, cores or time than the partition has; {LESS}"),
    (r"BadConstraints", f"no node fits the request (constraint, GPU type, memory); {LESS}"),
    (r"MaxMemPerLimit|AccountNotAllowed|InvalidAccount|InvalidQOS|QOSNotAllowed|AssocNotAllowed",
     "this account, qos or partition does not allow the job, so it will never start: cancel it and choose another "
     "account, qos or partition"),
    (r"(Assoc|QOS)(Max|Min)\w*(PerJob|PerNode|Wall|GRES\w*|Cpu\w*|Node)\w*",
     f"it exceeds a limit of the account or qos per job (sacctmgr show assoc, show qos); {LESS}"),
    (r"(Assoc|QOS)Grp\w*(Minutes|RunMinutes|Billing)\w*",
     "the account's budget is used up; wait for a new budget, or use another account"),
    (r"(Assoc|QOS)(Grp|Max)\w*", f"a limit of the account or qos for all its jobs is reached; {OTHERS}"),
    (r"ReqNodeNotAvail.*", "a requested node is down, drained or reserved; see sinfo -R and scontrol show reservation"),
    (r"DependencyNeverSatisfied", "the job that it depends on did not end as required; cancel the waiting job"),
    (r"Partition(Down|Inactive)", "the partition starts no jobs now; wait, or use another partition"),
    (r"JobHeldUser", "held by the user; release it with: scontrol release JOB"),
    (r"JobHeldAdmin|JobHoldMaxRequeue",
     "held by an administrator, or after too many requeues: ask the site, or cancel it before you submit it again"),
    (r"launch failed requeued held", "it could not be started on its node and is held; report it to the site"),
    (r"Reservation(Deleted)?", "its reservation is not active; see scontrol show reservation"),
    (r"Licenses", "it waits for a license that other jobs use"),
    (r"BeginTime", "it waits for the time given with --begin, or was just requeued"),
)  # fmt: skip


@cache
def explain(reason: str) -> str:
    """Return what Slurm's reason means and what to do.

    If the reason is unknown or needs no explanation, such as Priority, return ''.
    """
    return next((meaning for pattern, meaning in MEANINGS if re.fullmatch(pattern, reason)), "")
