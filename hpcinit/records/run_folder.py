"""Defines the names of the files in a run folder and the reasons for a restart, and reads records from JSON files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hpcinit.base import safe_files

SPEC = "spec.json"  # the settings that the job reads, written at submission: records/spec.py
CONFIG = "config.yaml"  # the composed config, for the user and for a resubmission
SCRIPT = "job.sh"  # the script as submitted
PROVENANCE = "provenance.json"  # versions, git commit, command line, names of variables
PICKLE = "submitted.pkl"  # a submitted function, in submitit's format
SUBMISSION = "submission.json"  # the job id; the file exists only if the run was submitted
EXIT = "exit.json"  # written by the batch script at its start, and at its end with the exit status
SWEEP = "sweep.json"  # in the folder of a sweep: the combination of each task. Task N runs in the folder N
RESUBMITTED = "resubmitted.jsonl"  # the runs that `hpcinit resubmit` made of this run, or of tasks of this sweep
PROGRESS = "progress.json"  # written by rank 0
JOB_RETURN = "job_return.pkl"  # by rank 0 of a job of a Hydra multirun: what its function returned or raised
RESULT = "result.json"  # written by rank 0 or by the program: the result, records/results.py
STARTUP = "startup.txt"  # by rank 0: what hpcinit set at each start, records/startup_settings.py
PROGRAM_USE = "program_use.json"  # written by rank 0: records/program_use.py
TRACKER = "tracker.txt"  # by run.tracker_id() on rank 0: the id of the tracker's run
STOPPED = "stopped.json"  # job and reason; exists while the program runs, and after an early stop (stop_record.py)
CHAIN = "chain.txt"  # by the batch script when the chain is finished, for the next job: exit status and job
RESTARTS = "restarts.jsonl"  # by hpcinit.after, a line for each restart: why, and the furthest step until then
ELASTIC = "elastic.jsonl"  # launch=torchrun, by the first agent: a line for each restart inside the job
STOP = "stop"  # by `hpcinit cancel --save`: requests that the ranks save and exit
CANCELLED = "cancelled.json"  # by `hpcinit cancel`: the jobs that it canceled
WORLD_SIZE = "world-size.json"  # written by a rank if the size of a process group differs from the job's
LOGS = "logs"
JOB_LOG = "logs/job.log"  # output of the batch script
RANK_LOG = "logs/rank-{rank}.log"
TIMELINE = "timeline"  # start-up events of every rank: timeline/JOB/HOST.jsonl, records/timeline.py
HANG_REPORTS = "hang"  # by the ranks of a job that hangs: their stacks and the report, records/hang_report.py
UNUSABLE = "unusable"  # empty files JOB.RESTART.NODE, by the check of a node or a fork server, for hpcinit.after
NCCL = "nccl"  # files JOB.RESTART.NODE.json, by the check of a node: NCCL's interface, records/node_facts.py
ERRORS = "errors"  # one record per rank that raised: errors/rank-3.json
ENV_FOLDER = "HPCINIT_RUN"  # environment variable: the run folder, in every process of the job
ENV_ENGINE = "HPCINIT_ENGINE"  # environment variable of all processes of cluster=local: the id of the engine's process
ENDED_EARLY = 143  # exit status in EXIT of an attempt that Slurm terminated: 128 + SIGTERM
HUNG = 76  # exit status of a rank that hpcinit ended because the job hung
CODE = "code"  # snapshot=git: the copy of the checkout that the job runs
CODE_FILES = "code.json"  # the names of the files in CODE
CODE_DIFF = "code.diff"  # the uncommitted changes in CODE
# With worlds=each, the second component uses the folder component-1, and so on. Each of these folders has its own spec,
# logs and records, and links to the files SHARED_BY_COMPONENTS of the run folder.
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


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def from_known_fields(kind: type[T], document: Mapping[str, Any]) -> T:
    """Create a dataclass of type `kind` from the fields in `document`, which is a JSON object or a result of asdict().

    Lists in JSON become tuples, and objects become dataclasses. Unknown keys, for example of a later version, are
    ignored. Raise TypeError if a field without a default is missing, ValueError if a value has the wrong type, and
    AttributeError if `document` is not a mapping.
    """
    types = _types(kind)  # type: ignore[arg-type]
    return kind(**{name: _typed(name, types[name], value) for name, value in document.items() if name in types})


def from_fields(kind: type[T], document: Mapping[str, Any]) -> T:
    """Do the same as from_known_fields(), but also raise TypeError if `document` has an unknown key, at any level."""
    types = _types(kind)  # type: ignore[arg-type]
    if unknown := document.keys() - types.keys():
        raise TypeError(f"unknown key {min(unknown)}")
    return kind(**{name: _typed(name, types[name], value, from_fields) for name, value in document.items()})


def _typed(name: str, kind: Any, value: Any, read: Callable[[Any, Any], Any] = from_known_fields) -> Any:
    for one in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        parts, whole = get_args(one), get_origin(one) or one
        if whole is tuple and isinstance(value, (list, tuple)):
            each = parts[:1] * len(value) if parts[-1] is ... else parts
            return tuple(_typed(name, *pair, read) for pair in zip(each, value, strict=True))
        if is_dataclass(whole) and isinstance(value, Mapping):
            return read(whole, value)
        accepted = (int, float) if whole is float else whole
        if whole is Any or (isinstance(value, accepted) and (whole is bool or not isinstance(value, bool))):
            if isinstance(value, str):
                value.encode()  # a lone surrogate raises UnicodeEncodeError, which is a ValueError
            return value
    raise ValueError(f"{name} is {value!r:.40}, expected {getattr(kind, '__name__', kind)}")


def read_lines(kind: type[T], path: str | Path) -> Iterator[T]:
    """Yield the records in a file that contains one record per line. If the file cannot be read, yield none.

    Lines are skipped if a full disk cut them short, or if another version wrote them.
    """
    with suppress(OSError):
        for line in safe_files.read_text(path).splitlines():
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                yield from_known_fields(kind, json.loads(line))


def read_records(kind: type[T], folder: Path, pattern: str) -> Iterator[T]:
    """Yield the records in the files of `folder` that match `pattern`, sorted by name. Skip unreadable files."""
    with suppress(OSError):  # an error of the file server: ESTALE, EIO
        for path in sorted(folder.glob(pattern)):
            if record := read_record(kind, path):
                yield record


def read_record(kind: type[T], path: str | Path) -> T | None:
    """Return the record in a file, or None if the file is missing, unreadable, or from another version."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        return from_known_fields(kind, safe_files.read_json(path))
    return None
