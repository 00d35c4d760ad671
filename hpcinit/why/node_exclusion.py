"""Finds failures that a node caused, and adds them to the cluster's record of failed nodes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcinit.base import safe_files
from hpcinit.base.text import brief
from hpcinit.engine import ENGINES
from hpcinit.records import node_records, run_folder
from hpcinit.records.node_records import NodeFailure

if TYPE_CHECKING:
    from hpcinit.why.evidence import Evidence

MOST_OF_A_NAME = 8  # how many runs of each name are checked: those with the highest numbers
MOST_TASKS = 256  # how many tasks of a sweep are checked
LOG_BYTES = 65536  # how much is read from the end of a job's log
FAULTS = (b"Node failure on", b"Task launch for")  # printed by srun; records/job_log.py reads them


def record_faulty_nodes(run: Path, found: Evidence) -> None:
    """Add the node failures in the evidence to the cluster's record, if this user owns the run.

    If the record cannot be written, do nothing.
    """
    if not safe_files.is_own(run):
        return
    submission = safe_files.json_or_empty(run / run_folder.SUBMISSION)
    if _has_nodes(submission):
        path = node_records.file(os.environ, str(submission.get("cluster", "")))
        with contextlib.suppress(OSError):
            node_records.append(
                path, node_records.new_record(_failures(run, submission, found), node_records.read(path))
            )


def look(runs_dir: Path, cluster: str, now: float, expiry_h: float) -> list[NodeFailure]:
    """Return the node failures of recent runs in `runs_dir` on this cluster.

    A run is recent if it changed in the last `expiry_h` hours. Every submission calls this function, so it neither
    queries Slurm nor reads the logs of ranks.
    """
    found: list[NodeFailure] = []
    for run in _recent(runs_dir, now - expiry_h * 3600):
        submission = safe_files.json_or_empty(run / run_folder.SUBMISSION)
        if submission.get("cluster") == cluster and _has_nodes(submission) and _has_evidence(run):
            found += _failures(run, submission, _left(run, str(submission.get("job_id", ""))))
    return found


def _has_nodes(submission: Mapping[str, Any]) -> bool:
    engine = ENGINES.get(submission.get("engine", ""))
    return engine is not None and engine.other_machines


def _failures(run: Path, submission: Mapping[str, Any], found: Evidence) -> Iterator[NodeFailure]:
    named = faulty_nodes(found)
    if not named:
        return
    job = str(safe_files.json_or_empty(run / run_folder.EXIT).get("job", "") or submission.get("job_id", ""))
    try:
        at = (run / run_folder.JOB_LOG).stat().st_mtime
    except OSError:
        at = float(submission.get("submitted", 0.0))
    for fault in named:
        yield NodeFailure(at, fault.host, fault.kind, str(run.absolute()), job, fault.about)


def _recent(runs_dir: Path, since: float) -> Iterator[Path]:
    """Yield the runs and sweep tasks whose folder changed after `since`.

    When an attempt ends, its folder changes, because exit.json is added.
    """
    by_name: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(runs_dir):  # noqa: PTH208 - no stat for each of thousands of folders
            stem, dash, number = name.rpartition("-")
            if dash and number.isdigit():
                by_name.setdefault(stem, []).append(name)
    for names in by_name.values():
        last = sorted(names, key=lambda name: int(name.rpartition("-")[2]))[-MOST_OF_A_NAME:]
        yield from _changed((runs_dir / name for name in last), since)


def _changed(paths: Iterable[Path], since: float) -> Iterator[Path]:
    for path in paths:
        with contextlib.suppress(OSError):
            if not safe_files.is_own(path):  # otherwise another user could decide which nodes these jobs avoid
                continue
            if (path / run_folder.SWEEP).exists():
                tasks = [name for name in os.listdir(path) if name.isdigit()][:MOST_TASKS]  # noqa: PTH208
                yield from _changed((path / name for name in tasks), since)
            elif path.stat().st_mtime > since:
                yield path


def _has_evidence(run: Path) -> bool:
    folders = (run / run_folder.ERRORS, run / "hang")  # records/hang_report.py: FOLDER
    return any(map(_has_files, folders)) or any(fault in _end(run / run_folder.JOB_LOG) for fault in FAULTS)


def _has_files(folder: Path) -> bool:
    try:
        return bool(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return False


def _left(run: Path, job_id: str) -> Evidence:
    from hpcinit.records import error_records, hang_report, job_log  # noqa: PLC0415
    from hpcinit.why.evidence import Evidence  # noqa: PLC0415

    attempt = safe_files.json_or_empty(run / run_folder.EXIT)
    job_id = str(attempt.get("job", "")) or job_id
    restart = attempt.get("restart")
    every = list(error_records.read(run / run_folder.ERRORS))
    return Evidence(
        state="",
        found=error_records.of_last_attempt(every, job_id, restart if isinstance(restart, int) else None),
        log=job_log.read(_end(run / run_folder.JOB_LOG).decode(errors="replace")),
        hang=hang_report.left(run, job_id, restart),
    )


def _end(path: Path) -> bytes:
    try:
        with safe_files.open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            return file.read()
    except OSError:
        return b""


# Below: which nodes ended a run, according to heartbeats and to messages of Slurm and the driver. Messages that a
# faulty program can cause do not count.

NODE_FAIL, NO_HEARTBEATS, UNREACHABLE = "NODE_FAIL", "no heartbeats", "slurmd unreachable"
_XID = re.compile(r"\bXid(?: ?\(PCI:[^)]*\))?[: ]+(\d{1,3})\b")  # NVRM: Xid (PCI:0000:10:1c): 79, pid=...; 'Xid 79'
_MESSAGES = (
    ("ECC", re.compile(r"[Uu]ncorrect(?:able|ed) (?:ECC|memory) error")),  # error 214 of CUDA and HIP
    ("NVLink", re.compile(r"[Uu]ncorrectable NVLink error")),  # error 220 of CUDA
    ("GPU lost", re.compile(r"fallen off the bus|GPU is lost")),  # error 15 of NVML
)


class NodeFault(NamedTuple):
    host: str
    kind: str
    about: str = ""


def faulty_nodes(evidence: Evidence) -> list[NodeFault]:
    """Return each faulty node, once per kind of fault.

    If the OOM killer killed a process, do not count lost and silent nodes: a healthy node can fail when its memory is
    full.
    """
    found = [*_of_errors(evidence)]
    if not evidence.oom:
        found += _of_slurm(evidence)
    return list({(fault.host, fault.kind): fault for fault in found if _is_one(fault.host)}.values())


def _is_one(host: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host))  # srun also prints 'n[1-2]: tasks 2-3'


def _of_slurm(evidence: Evidence) -> Iterator[NodeFault]:
    for host in dict.fromkeys((*evidence.log.lost, *evidence.nodes)):
        yield NodeFault(host, NODE_FAIL, evidence.nodes.get(host, ""))
    if len(evidence.log.unreachable) == 1:  # several unreachable nodes may have the same faulty image
        yield NodeFault(evidence.log.unreachable[0], UNREACHABLE)
    for node in evidence.hang.silent_nodes if evidence.hang else ():
        if len(node.ranks) > 1:  # on a healthy node, a single rank may be stopped or keep the GIL
            yield NodeFault(node.host, NO_HEARTBEATS, str(node))


def _of_errors(evidence: Evidence) -> Iterator[NodeFault]:
    from hpcinit.records import causes  # noqa: PLC0415 - a submission reads the table only

    texts = [(one.record.host, one.record.foreign) for one in evidence.found if not causes.is_secondary(one.record)]
    tails = evidence.tails
    texts += [(end.host, tails[rank]) for end in evidence.log.ends for rank in end.ranks if rank in tails]
    for host, text in texts:
        if kind := hardware_fault(text):
            yield NodeFault(host, kind, brief(text))


def hardware_fault(text: str) -> str:
    """Return the kind of hardware fault that an error message reports, such as 'Xid 79' or 'ECC', or ''."""
    for number in _XID.findall(text):
        if int(number) in node_records.DEVICE_XIDS:
            return f"Xid {number}"
    return next((kind for kind, pattern in _MESSAGES if pattern.search(text)), "")
