"""Names of the files in a run folder, reasons for a restart, and records with fields that this version does not
know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

SPEC = "spec.json"  # login node writes, ranks read
CONFIG = "config.yaml"  # the composed config, to read and to run again
SCRIPT = "job.sh"  # the script as submitted
PROVENANCE = "provenance.json"  # versions, git commit, command line
SUBMISSION = "submission.json"  # the job id; its presence means: submitted
EXIT = "exit.json"  # the batch script's own record: of its start, and of its end in that one's place
SWEEP = "sweep.json"  # in the folder of a sweep: the combination of each task, whose folder is the number below it
ENV = "env.sh"  # of a task in an array: its own environment variables
PROGRESS = "progress.json"  # written by rank 0
RESULT = "result.json"  # written by rank 0 or by the program itself: what the run came to, records/results.py
STOPPED = "stopped.txt"  # job and reason: the ranks stopped before the end, or their program has not ended
STEP = "step.txt"  # the step in PROGRESS, for the batch script
CHAIN = "chain.txt"  # by the batch script of a chain, for the next job: job, lines of the log before it, exit status
RESTART = "restart.txt"  # by the batch script, for the next attempt: the last line of RESTARTS
RESTARTS = "restarts.jsonl"  # by the batch script, a line for each restart: why, and the furthest step until then
ELASTIC = "elastic.jsonl"  # launch=torchrun, by the first agent: a line for each restart inside the job
STOP = "stop"  # made by `hpcinit cancel --save`: the ranks are to save and end
CANCELLED = "cancelled.json"  # by `hpcinit cancel`: the jobs that it has cancelled
LOGS = "logs"
JOB_LOG = "logs/job.log"  # the batch script's own output
RANK_LOG = "logs/rank-{rank}.log"
REPORT = "report.html"  # by `hpcinit report`
TIMELINE = "timeline"  # moments of every rank's start: timeline/JOB/HOST.jsonl, records/timeline.py
ERRORS = "errors"  # one record per rank that raised: errors/rank-3.json
ENV_FOLDER = "HPCINIT_RUN"  # environment variable: the run folder, in every process of the job
ENDED_EARLY = 143  # exit status in EXIT of an attempt that was told to end: 128 + SIGTERM
CODE = "code"  # snapshot=git: the checkout as it was, from which the job runs
CODE_FILES = "code.json"  # the names of its files
CODE_DIFF = "code.diff"  # what in it was not committed


# Why a job is begun once more, in the words of `restart.on` and of restarts.jsonl.

PREEMPTED = "preempted"
NODE_FAIL = "node_fail"
HANG = "hang"
TIME_LIMIT = "time_limit"  # a training that stopped in time, by run.should_stop()
FAILURE = "failure"  # any other end but 0 and 2, which means a wrong request
SLURM = "slurm"  # Slurm has requeued the job by itself: a preemption, a lost node, or somebody's scontrol requeue
REASONS = (PREEMPTED, NODE_FAIL, HANG, TIME_LIMIT, FAILURE)


# Records that another version of hpcinit may have written.

T = TypeVar("T")


def from_known_fields(kind: type[T], document: Mapping[str, Any]) -> T:
    """The dataclass `kind` of what it has fields for; what a later version has added is left out.

    Raises TypeError where a field without a default is missing, AttributeError where `document` is no mapping.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in document.items() if key in known})
