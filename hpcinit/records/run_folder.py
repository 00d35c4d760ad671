"""Names of the files in a run folder, reasons for a restart, and functions that read records of other versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

SPEC = "spec.json"  # login node writes, ranks read
CONFIG = "config.yaml"  # the composed config, to read and to run again
SCRIPT = "job.sh"  # the script as submitted
PROVENANCE = "provenance.json"  # versions, git commit, command line, names of variables
PICKLE = "submitted.pkl"  # of a function: submitit's, under a name without the job id
SUBMISSION = "submission.json"  # the job id; its presence means: submitted
EXIT = "exit.json"  # by the batch script: its start, replaced by its end
SWEEP = "sweep.json"  # in the folder of a sweep: the combination of each task, which runs in the folder with its number
RESUBMITTED = "resubmitted.jsonl"  # the runs that `hpcinit resubmit` made of this run, or of tasks of this sweep
ENV = "env.sh"  # the environment variables of one task of an array
PROGRESS = "progress.json"  # written by rank 0
JOB_RETURN = "job_return.pkl"  # by rank 0 of a job of a Hydra multirun: what its function returned or raised
RESULT = "result.json"  # written by rank 0 or by the program: the result, records/results.py
STARTUP = "startup.txt"  # by rank 0: what hpcinit set at each start, records/startup_settings.py
PROGRAM_USE = "program_use.json"  # written by rank 0: records/program_use.py
STOPPED = "stopped.json"  # job and reason: the ranks stopped before the end, or their program still runs
CHAIN = "chain.txt"  # by the batch script when its chain is over, for the next job: exit status and job
RESTARTS = "restarts.jsonl"  # by hpcinit.after, a line for each restart: why, and the furthest step until then
ELASTIC = "elastic.jsonl"  # launch=torchrun, by the first agent: a line for each restart inside the job
STOP = "stop"  # by `hpcinit cancel --save`: asks the ranks to save and exit
CANCELLED = "cancelled.json"  # by `hpcinit cancel`: the jobs that it canceled
WORLD_SIZE = "world-size.json"  # by a rank: a process group that differs from the job's
LOGS = "logs"
JOB_LOG = "logs/job.log"  # output of the batch script
RANK_LOG = "logs/rank-{rank}.log"
TIMELINE = "timeline"  # start-up events of every rank: timeline/JOB/HOST.jsonl, records/timeline.py
HANG_REPORTS = "hang"  # by the ranks of a job that hangs: their stacks and the report, records/hang_report.py
UNUSABLE = "unusable"  # by the check of a node, for hpcinit.after: JOB.RESTART.NODE, an empty file
NCCL = "nccl"  # by the check of a node: the interface that NCCL uses, JOB.RESTART.NODE.json, records/node_facts.py
ERRORS = "errors"  # one record per rank that raised: errors/rank-3.json
ENV_FOLDER = "HPCINIT_RUN"  # environment variable: the run folder, in every process of the job
ENV_ENGINE = "HPCINIT_ENGINE"  # environment variable of all processes of cluster=local: the id of the engine's process
ENDED_EARLY = 143  # exit status in EXIT of an attempt that Slurm terminated: 128 + SIGTERM
HUNG = 76  # exit status of a rank that hpcinit ended because the job hung
CODE = "code"  # snapshot=git: the copy of the checkout that the job runs
CODE_FILES = "code.json"  # the names of the files in CODE
CODE_DIFF = "code.diff"  # its uncommitted changes
# worlds=each: the folder of a further component, before its number. It has its spec, logs and records, and links to the
# run's files SHARED_BY_COMPONENTS.
COMPONENT = "component-"
SHARED_BY_COMPONENTS = (SUBMISSION, EXIT, CANCELLED, STOP)


# Why a job is restarted: values of `restart.on` and of restarts.jsonl.

PREEMPTED = "preempted"
NODE_FAIL = "node_fail"
HANG = "hang"
TIME_LIMIT = "time_limit"  # training stopped before the limit, by run.should_stop()
FAILURE = "failure"  # any other exit status except 0 and 2 (2: a wrong request)
SLURM = "slurm"  # Slurm requeued the job: a preemption, a node failure, or scontrol requeue
REASONS = (PREEMPTED, NODE_FAIL, HANG, TIME_LIMIT, FAILURE)


T = TypeVar("T")


def from_known_fields(kind: type[T], document: Mapping[str, Any]) -> T:
    """Return a dataclass `kind` from the keys of `document`. Ignore keys of later versions.

    Raise TypeError if a field without a default is missing, AttributeError if `document` is not a mapping.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in document.items() if key in known})
