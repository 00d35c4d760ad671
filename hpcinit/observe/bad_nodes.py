"""Failures that name a node, from run folders into the cluster's table. Which words do: facts/node_faults.py."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcinit.facts import bad_nodes, runfolder
from hpcinit.facts.bad_nodes import NodeFailure

if TYPE_CHECKING:  # what reads evidence is imported for runs that have some: this is a part of every submission
    from hpcinit.facts.evidence import Evidence

MOST_OF_A_NAME = 8  # runs NAME-0042, the highest numbers
MOST_TASKS = 256  # of a sweep
LOG_BYTES = 65536  # of the end of a job's log
WORDS = (b"Node failure on", b"Task launch for")  # srun's, of facts/job_log.py


def note(run: Path, found: Evidence) -> None:
    """What `hpcinit why` has found in a run's `found` goes into the table; it never fails for that."""
    submission = _json(run / runfolder.SUBMISSION)
    if submission.get("engine") == "slurm":
        path = bad_nodes.file(os.environ, str(submission.get("cluster", "")))
        with contextlib.suppress(OSError):
            bad_nodes.append(path, bad_nodes.new(_failures(run, submission, found), bad_nodes.read(path)))


def look(runs_dir: Path, cluster: str, now: float, expiry_h: float) -> list[NodeFailure]:
    """In the runs of `runs_dir` on this cluster that have changed in so many hours: what their files tell.

    No question to Slurm and no log of a rank: it is made before every submission.
    """
    found: list[NodeFailure] = []
    for run in _recent(runs_dir, now - expiry_h * 3600):
        submission = _json(run / runfolder.SUBMISSION)
        mine = submission.get("engine") == "slurm" and submission.get("cluster") == cluster
        if mine and _has_evidence(run):
            found += _failures(run, submission, _left(run, str(submission.get("job_id", ""))))
    return found


def _failures(run: Path, submission: Mapping[str, Any], found: Evidence) -> Iterator[NodeFailure]:
    from hpcinit.facts import node_faults  # noqa: PLC0415

    named = node_faults.named(found)
    if not named:
        return
    job = str(_json(run / runfolder.EXIT).get("job", "") or submission.get("job_id", ""))
    try:
        at = (run / runfolder.JOB_LOG).stat().st_mtime
    except OSError:
        at = float(submission.get("submitted", 0.0))
    for fault in named:
        yield NodeFailure(at, fault.host, fault.kind, str(run.absolute()), job, fault.about)


def _recent(runs_dir: Path, since: float) -> Iterator[Path]:
    """Runs and tasks of sweeps whose folder has changed since: exit.json is put into it when an attempt ends."""
    by_name: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(runs_dir):  # noqa: PTH208 - no stat for each of thousands
            stem, dash, number = name.rpartition("-")
            if dash and number.isdigit():
                by_name.setdefault(stem, []).append(name)
    for names in by_name.values():
        last = sorted(names, key=lambda name: int(name.rpartition("-")[2]))[-MOST_OF_A_NAME:]
        yield from _changed((runs_dir / name for name in last), since)


def _changed(paths: Iterable[Path], since: float) -> Iterator[Path]:
    for path in paths:
        with contextlib.suppress(OSError):
            if (path / runfolder.SWEEP).exists():
                tasks = [name for name in os.listdir(path) if name.isdigit()][:MOST_TASKS]  # noqa: PTH208
                yield from _changed((path / name for name in tasks), since)
            elif path.stat().st_mtime > since:
                yield path


def _has_evidence(run: Path) -> bool:
    folders = (run / runfolder.ERRORS, run / "hang")  # facts/hangs.py: FOLDER
    return any(map(_holds, folders)) or any(word in _end(run / runfolder.JOB_LOG) for word in WORDS)


def _holds(folder: Path) -> bool:
    try:
        return bool(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return False


def _left(run: Path, job_id: str) -> Evidence:
    from hpcinit.facts import error_records, hangs, job_log  # noqa: PLC0415
    from hpcinit.facts.evidence import Evidence  # noqa: PLC0415

    attempt = _json(run / runfolder.EXIT)
    job_id = str(attempt.get("job", "")) or job_id
    restart = attempt.get("restart")
    every = list(error_records.read(run / runfolder.ERRORS))
    return Evidence(
        state="",
        found=error_records.of_last_attempt(every, job_id, restart if isinstance(restart, int) else None),
        log=job_log.read(_end(run / runfolder.JOB_LOG).decode(errors="replace")),
        hang=hangs.left(run, job_id, restart),
    )


def _end(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            return file.read()
    except OSError:
        return b""


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
