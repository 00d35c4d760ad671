"""Why a job is begun once more, in the words of `restart.on` and of restarts.jsonl."""

from __future__ import annotations

PREEMPTED = "preempted"
NODE_FAIL = "node_fail"
HANG = "hang"
TIME_LIMIT = "time_limit"  # a training that stopped in time, by run.should_stop()
FAILURE = "failure"  # any other end but 0 and 2, which means a wrong request
SLURM = "slurm"  # Slurm has requeued the job by itself: a preemption, a lost node, or somebody's scontrol requeue
REASONS = (PREEMPTED, NODE_FAIL, HANG, TIME_LIMIT, FAILURE)
