"""What Slurm's reasons for a waiting job mean, and what to do about those that need an action."""

from __future__ import annotations

import re
from functools import cache

LESS = "it will not start as it is: cancel it and ask for less, or ask elsewhere"
OTHERS = "it starts when other jobs under the same limit have ended"
# Reasons of squeue(1), JOB REASON CODES, in Slurm 22.05 to 24.11; the first that fits.
MEANINGS = (
    (r"PartitionNodeLimit", f"more nodes than the partition allows, or its nodes are down; {LESS}"),
    (r"PartitionTimeLimit", f"a longer time limit than the partition's; {LESS}"),
    (r"PartitionConfig", f"more nodes, cores or time than the partition has; {LESS}"),
    (r"BadConstraints", f"no node has what is asked for; {LESS} (constraint, GPU type, memory)"),
    (r"MaxMemPerLimit|AccountNotAllowed|InvalidAccount|InvalidQOS|QOSNotAllowed|AssocNotAllowed",
     "not allowed with this account, qos or partition; it will not start as it is: cancel it and ask for another"),
    (r"(Assoc|QOS)(Max|Min)\w*(PerJob|PerNode|Wall|GRES\w*|Cpu\w*|Node)\w*",
     f"over a limit of the account or qos for one job; {LESS} (sacctmgr show assoc, show qos)"),
    (r"(Assoc|QOS)Grp\w*(Minutes|RunMinutes|Billing)\w*",
     "the account's budget is used up; it starts when there is budget again, or choose another account"),
    (r"(Assoc|QOS)(Grp|Max)\w*", f"over a limit of the account or qos for all its jobs together; {OTHERS}"),
    (r"ReqNodeNotAvail.*", "a node that was asked for is down, drained or reserved; sinfo -R says why, "
                           "scontrol show reservation what is coming"),
    (r"DependencyNeverSatisfied", "the job that it waits for ended in another way than it asks; cancel it"),
    (r"Partition(Down|Inactive)", "the partition takes no jobs at the moment; wait, or choose another"),
    (r"JobHeldUser", "held; scontrol release JOB lets it go"),
    (r"JobHeldAdmin|JobHoldMaxRequeue", "held by an administrator, or after too many requeues; submit again or ask"),
    (r"launch failed requeued held", "it could not be started on its node and is held; tell the administrators"),
    (r"Reservation(Deleted)?", "its reservation is not active; scontrol show reservation"),
    (r"Licenses", "waits for a licence that others hold"),
    (r"BeginTime", "waits for the time that --begin names, or was requeued a moment ago"),
)  # fmt: skip


@cache
def explain(reason: str) -> str:
    """In words, with what to do; '' for a reason that is plain (Resources, Priority) or not known."""
    return next((words for pattern, words in MEANINGS if re.fullmatch(pattern, reason)), "")
