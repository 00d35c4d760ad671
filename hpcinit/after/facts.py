"""Collects facts about how the ranks ended, from the run folder and from Slurm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcinit.after.decisions import Facts
from hpcinit.base import safe_files
from hpcinit.records import hang_report, job_log, run_folder
from hpcinit.slurm import nodelist, scontrol, slurm_client
from hpcinit.slurm.slurm_client import Unreachable

DOWN = ("down", "fail")  # states of a node that is lost; sinfo adds '*' to a node that does not respond


@dataclass(frozen=True)
class Job:
    """The job and its current attempt.

    name: the job's id as squeue shows it, '17_1' for an array task.
    number: SLURM_JOB_ID.
    job_from: the byte of the job's log at which the output of this attempt starts.
    from_: the byte at which the output of the latest start of the ranks in this attempt starts.
    excluded: nodes that the ranks no longer use.
    """

    folder: Path
    name: str
    number: str
    attempt: int
    nodelist: str
    nodes: int
    job_from: int = 0
    from_: int = 0
    excluded: tuple[str, ...] = ()


def gather(job: Job, status: int, restarts: bool) -> Facts:
    """Collect the facts about how the ranks ended.

    status: srun's exit status.
    restarts: whether to collect the facts that only a restart needs.
    """
    lines, record = _log(job, job.job_from), _record(job.name)
    lost = _lost(job, record) if restarts and status else ()
    return Facts(
        status=status,
        failures=tuple(job_log.failures(lines if job.from_ == job.job_from else _log(job, job.from_))),
        stop=_stop(job),
        preempted=bool(scontrol.preempted_at(record)),
        lost=tuple(lost),
        unusable=tuple(_unusable(job)) if restarts and status else (),
        hung=tuple(_hung(job)) if restarts and status else (),
        node_failed=job_log.node_failed(lines),
    )


def _log(job: Job, start: int) -> list[str]:
    """Return Slurm's messages in the job's log, starting at byte `start`."""
    with suppress(OSError), safe_files.open_file(job.folder / run_folder.JOB_LOG) as file:
        file.seek(start)
        texts = (line.decode(errors="replace").rstrip("\n") for line in file)
        return [text for text in texts if job_log.is_from_slurm(text)]
    return []


def _stop(job: Job) -> str:
    """Return the reason in this job's stop record, or '' if there is no record."""
    record = safe_files.json_or_empty(job.folder / run_folder.STOPPED)
    return str(record.get("reason", "")) if record.get("job") == job.number else ""


def _record(name: str) -> dict[str, str]:
    """Return what `scontrol show job` prints about the job, or {}."""
    found = scontrol.records(_printed("scontrol", "show", "job", name), "JobId")
    return found[0] if found else {}


def _lost(job: Job, record: Mapping[str, str]) -> Iterator[str]:
    """Yield the job's nodes that are down, and those that Slurm has removed from the job (--no-kill).

    A removed node may be up again, but this job cannot use it.
    """
    yield from lost_nodes(job.nodelist, job.excluded)
    left = record.get("NodeList", "")
    if left not in scontrol.NOTHING and record.get("JobState") == "RUNNING":
        left_hosts = set(nodelist.expand(left))
        yield from (host for host in nodelist.expand(job.nodelist) if host not in left_hosts | set(job.excluded))


def lost_nodes(nodelist: str, excluded: Collection[str]) -> Iterator[str]:
    """Yield the nodes in `nodelist` that are down or do not respond, except those in `excluded`."""
    # Without --all, sinfo omits nodes that are in hidden partitions only.
    query = ("sinfo", "--all", "--noheader", "--Node", f"--nodes={nodelist}", "--format=%N %T")
    for line in sorted(set(_printed(*query).splitlines())):
        node, _, state = line.strip().partition(" ")
        if node not in excluded and (state.startswith(DOWN) or state.endswith("*")):
            yield node


def _unusable(job: Job) -> Iterator[str]:
    """Yield the nodes on which this attempt's node check failed, or that its fork servers could no longer reach."""
    start = f"{job.number}.{job.attempt}."
    for path in sorted((job.folder / run_folder.UNUSABLE).glob(f"{start}*")):
        yield path.name.removeprefix(start)


def _hung(job: Job) -> Iterator[str]:
    """For each hang report written since the ranks started, yield the node at fault, or '' if it is unknown."""
    with suppress(OSError):
        began = (job.folder / run_folder.EXIT).stat().st_mtime
        for path in sorted((job.folder / run_folder.HANG_REPORTS).glob(f"{job.number}.*/{hang_report.REPORT}")):
            if path.stat().st_mtime > began:
                yield str(safe_files.json_or_empty(path.with_name(hang_report.RECORD)).get("host") or "")


def is_running(name: str) -> bool:
    """Return whether the job's state is RUNNING. If it is not, Slurm is already ending the job.

    name: the job's id as squeue shows it.
    """
    return _printed("squeue", "--noheader", f"--jobs={name}", "--format=%T").strip() == "RUNNING"


def _printed(*command: str) -> str:
    try:
        return slurm_client.run(command).stdout
    except Unreachable:
        return ""
