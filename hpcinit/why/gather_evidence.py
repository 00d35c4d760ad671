"""Collects the evidence about a run: error records, logs, hang reports, and Slurm's reports about job and nodes."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from hpcinit.base import background_writer, safe_files
from hpcinit.base.errors import SpecError
from hpcinit.engine import slurm_engine
from hpcinit.observe import logs, progress, state
from hpcinit.records import (
    causes,
    error_records,
    hang_report,
    heartbeats,
    job_log,
    job_record,
    program_use,
    run_folder,
    spec,
    timeline,
)
from hpcinit.records.error_records import ErrorRecord, Found
from hpcinit.records.hang_report import HangReport
from hpcinit.records.starts import STARTS
from hpcinit.slurm import scontrol, slurm_client
from hpcinit.why import (
    flight_recorder,
    hang_verdict,
    large_logs,
    log_lines,
    read_tracebacks,
    read_watchdog,
    setup_failure,
)
from hpcinit.why.evidence import Evidence, Watched, clocks
from hpcinit.why.read_tracebacks import Error

LIMIT = timedelta(seconds=15)  # timeout of scontrol: a verdict without its answer is better than a long wait
TAIL_BYTES = 32768  # how much is read from the end of each rank's log: torch's watchdog prints long C++ stacks
MOST_LOGS = 1024
MOST_OF_JOB_LOG = 64 << 20  # bytes of logs/job.log that are read completely
# Lines in a rank's log that other programs print, or that do not explain an end.
_NOT_LAST = re.compile(r"^(?:hpcinit: |\[W)|^\s*$")
_REFUSAL = re.compile(r"slurmstepd\S*: error: execve\(\)")  # it explains why the rank did not start


def gather(path: Path, now: state.State) -> Evidence:
    """Return the evidence about the last attempt of the run in `path`.

    now: the state of the run.
    """
    attempt = safe_files.json_or_empty(path / run_folder.EXIT)
    job_id = str(attempt.get("job", "")) or now.job_id
    restart = attempt.get("restart")
    # Read the log before the records: srun reports the end of a rank after the rank has written its record.
    log = job_log.read(_text(path / run_folder.JOB_LOG), spec.ranks_per_task(path))
    every = list(error_records.read(path / run_folder.ERRORS))
    found = error_records.of_last_attempt(every, job_id, restart if isinstance(restart, int) else None)
    slurm = now.engine.uses_slurm and not now.away  # otherwise each query would time out
    job = _record("job", job_id, "JobId") if slurm else {}
    if job and slurm_engine.is_other(
        job_record.last_submission(path), job_id, job.get("Comment", ""), job.get("Command", "")
    ):
        job = {}
    started = _started(path, job_id, restart)
    hosts = {rank.rank: rank.host for rank in started} | _hosts_by_rank(path, job_id, restart)
    recorded = {one.record.rank for one in found}
    # A rank's log contains the output of all attempts.
    since = min((min(rank.events.values(), default=0.0) for rank in started), default=0.0) if restart else 0.0
    ends = _ends_of_logs(path, since)
    tails = {rank: end.last for rank, end in ends.items() if end.last and rank not in recorded}
    for rank in ends.keys() - recorded:
        found += ends[rank].errors(rank, hosts.get(rank, ""))
    oom = next((end.oom for end in ends.values() if end.oom), "")
    if oom and not log.oom:
        log = replace(log, oom=oom)
    gone = now.name == "NODE_FAIL" or (log.cancelled is not None and log.cancelled.why == "NODE FAILURE")
    silent = now.requeued and log.cancelled is None  # requeued, but the job's log does not show why
    nodes = _nodes(log.lost) if slurm and log.lost else {}
    if slurm and (gone or silent) and not log.lost:  # the batch script's own node failed, so the log does not name it
        nodes = _down(",".join(_hosts(path, job_id, restart)) if now.requeued else job.get("NodeList", ""))
    preempted_at = scontrol.preempted_at(job)
    reported = progress.read(path)
    silence = _silence(path, now, job_id, restart) if not reported else None
    planned = _spec(path)
    returned = frozenset(rank.rank for rank in started if rank.returned is not None)
    return Evidence(
        state="NODE_FAIL" if silent and nodes else now.name,
        reason=now.reason,
        exit_status=now.exit_status if now.exit_status is not None else job_record.exit_status(path),
        who=now.reason.partition("by ")[2] if now.name == "CANCELLED" else "",
        found=found,
        log=job_log.with_preemption(log, preempted_at),
        clocks=clocks(_differences(path, found)),
        nodes=nodes,
        hang=hang_report.left(path, job_id, restart) or _unreported_hang(path, job_id, restart, found),
        silence=silence,
        flight=_flight(path, now, job_id, restart, silence, hosts, returned),
        tails=tails,
        step=max([int(reported.get("step", -1)), *(one.record.step for one in found)]),
        time_min=scontrol.minutes(job.get("TimeLimit")),
        uses=(program_use.read(path) or program_use.ProgramUse(program_use.WRAP)).uses,
        preempted=bool(preempted_at),
        size=planned.world_size if planned else 0,
        hosts=hosts,
        returned=returned,
        setup=setup_failure.read(path, attempt, log.output),
        every_end_is_logged=planned is not None and STARTS[planned.launch.kind].task_per_rank,
        watched=[one for end in ends.values() for one in end.watched],
    )


def dumps(path: Path, now: state.State) -> tuple[Mapping[int, Mapping[str, Any]], frozenset[int]]:
    """Return the flight recorder's dumps of the last attempt, and the ranks whose program ended with status 0.

    now: the state of the run.
    """
    attempt = safe_files.json_or_empty(path / run_folder.EXIT)
    job_id, restart = str(attempt.get("job", "")) or now.job_id, attempt.get("restart")
    returned = (rank.rank for rank in _started(path, job_id, restart) if rank.returned is not None)
    return flight_recorder.read_attempt(path, job_id, restart), frozenset(returned)


def _flight(
    path: Path, now: state.State, job_id: str, restart: object, silence: HangReport | None, hosts: Mapping[int, str],
    returned: frozenset[int],
) -> hang_verdict.HangVerdict:  # fmt: skip
    """Return the verdict on the flight recorder's dumps.

    It is empty while ranks may still be writing dumps. It is also empty if the ranks have stopped printing, but their
    stacks do not prove a hang.
    """
    if silence and not silence.certain:
        return hang_verdict.HangVerdict()
    dumps = flight_recorder.read_attempt(path, job_id, restart)
    times = [at for dump in dumps.values() if isinstance(at := dump.get(flight_recorder.WRITTEN_NS), int)]
    reported = hang_report.left(path, job_id, restart)
    if now.name == "RUNNING" and not reported and time.time() - max(times, default=0) / 1e9 < flight_recorder.SETTLE_S:
        return hang_verdict.HangVerdict()
    return hang_verdict.verdict(dumps, hosts, returned)


def _spec(path: Path) -> spec.Spec | None:
    with contextlib.suppress(SpecError):
        return spec.load(path / run_folder.SPEC, to_run=False)
    return None


def _unreported_hang(path: Path, job_id: str, restart: object, found: Sequence[Found]) -> HangReport | None:
    """If a collective timed out before any rank reported a hang, return a report from the ranks' stacks.

    Return None if no collective timed out, or if there are no stacks.
    """
    timeouts = [one.record.time for one in found if causes.is_timeout(one.record)]
    if not timeouts or not all(causes.is_secondary(one.record) for one in found):
        return None
    raised = {one.record.rank: hang_report.place_of_error(one.record.traceback) for one in found}
    planned = _spec(path)
    for folder in sorted((path / run_folder.HANG_REPORTS).glob(f"{_step_of(job_id)}.*.{restart}")):
        stacks = hang_report.before_errors(hang_report.places(folder), raised)
        nodes = list(heartbeats.read(path / heartbeats.FOLDER / folder.name))
        if stacks and any(heartbeat.silent_s is not None for node in nodes for heartbeat in node.heartbeats):
            return hang_report.report(nodes, stacks, min(timeouts), planned.world_size if planned else len(stacks))
    return hang_report.without_output(path, job_id, restart, raised=raised)


def _silence(path: Path, now: state.State, job_id: str, restart: object) -> HangReport | None:
    """If all ranks have stopped printing, return what they are doing. Otherwise, return None.

    Ranks that run a command instead of Python write no stacks. For such ranks, check when their logs last changed.
    """
    runs = now.name == "RUNNING"
    if found := hang_report.without_output(path, job_id, restart, time.time() if runs else None):
        return found
    times = [(path / run_folder.LOGS).stat().st_mtime] if runs and logs.ranks(path) else []
    for rank in logs.ranks(path)[:MOST_LOGS] if runs else ():
        with contextlib.suppress(OSError):
            times.append(logs.of_rank(path, rank).stat().st_mtime)
    with contextlib.suppress(SpecError):
        after_s = spec.load(path / run_folder.SPEC, to_run=False).hang.after_s
        if times and after_s and time.time() - max(times) > after_s:
            return HangReport(output_silent_s=time.time() - max(times))
    return None


def age_s(path: Path, found: Evidence) -> float:
    """Return how many seconds ago the newest error record or line of the job's log was written."""
    written = [one.written for one in found.found]
    with contextlib.suppress(OSError):
        written.append((path / run_folder.JOB_LOG).stat().st_mtime)
    return time.time() - max(written, default=0.0)


def unwritable(path: Path) -> str:
    """Return why no file can be written in the run folder now, such as 'No space left on device' or a quota.

    If a file can be written, or if this user has no permission to write there, return ''.
    """
    try:
        with tempfile.NamedTemporaryFile(prefix=".hpcinit-", dir=path / run_folder.LOGS, buffering=0) as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror or str(error) if error.errno in background_writer.DISK else ""
    return ""


def _differences(path: Path, found: Sequence[Found]) -> Iterator[tuple[str, float]]:
    for one in found:
        yield one.record.host, one.written - one.record.time
    for folder in (path / heartbeats.FOLDER).glob("*"):
        for node in heartbeats.read(folder):
            with contextlib.suppress(OSError):
                yield node.host, (folder / f"{node.host}.json").stat().st_mtime - node.time


class LogEnd(NamedTuple):
    """The end of a rank's log.

    last: the last line that the program printed.
    oom: the line in which Slurm reports that the kernel killed a process for lack of memory, or ''.
    watched, ended: the messages of torch's watchdog after the last step, and the errors with which it ended the rank.
    written: when the log last changed.
    """

    last: str
    oom: str
    watched: Sequence[Watched]
    ended: Sequence[Error]
    written: float

    def errors(self, rank: int, host: str) -> Iterator[Found]:
        """Yield the error with which torch's watchdog ended the rank. The rank wrote no error record for it."""
        for one in self.ended[:1]:
            yield Found(ErrorRecord(self.written, rank, host, one.text, ""), self.written)


def _is_of_others(line: str) -> bool:
    return bool(_NOT_LAST.match(line)) or (job_log.is_from_slurm(line) and not _REFUSAL.match(line))


def _ends_of_logs(path: Path, since: float) -> dict[int, LogEnd]:
    """Return the end of each rank's log.

    since: when the attempt started. Older messages belong to another attempt.
    """
    found = {}
    for rank in logs.ranks(path)[:MOST_LOGS]:
        text, written = _end(logs.of_rank(path, rank))
        lines = text.splitlines()
        last = next((line.strip() for line in reversed(lines) if not _is_of_others(line)), "")
        printed = list(log_lines.lines(log_lines.Log(text, rank), log_lines.Labels(task=True, local=True)))
        steps = [number for number, line in enumerate(printed) if read_tracebacks.TRAINS.search(line.text)]
        after = printed[max(steps, default=-1) + 1 :] if written >= since else []
        found[rank] = LogEnd(last, job_log.oom(lines), *read_watchdog.read(after), written)
    return found


def _end(path: Path) -> tuple[str, float]:
    """Return the end of a file, and when it changed."""
    try:
        with safe_files.open_file(path) as file:
            status = path.stat()
            file.seek(max(0, status.st_size - TAIL_BYTES))
            return large_logs.decoded(file.read()), status.st_mtime
    except OSError:
        return "", 0.0


def _hosts(path: Path, job_id: str, restart: object) -> list[str]:
    """Return the nodes where ranks of an attempt wrote heartbeats."""
    return sorted(set(_hosts_by_rank(path, job_id, restart).values()))


def _hosts_by_rank(path: Path, job_id: str, restart: object) -> dict[int, str]:
    """Return the node of each rank of an attempt, from the heartbeats."""
    folders = (path / heartbeats.FOLDER).glob(f"{_step_of(job_id)}.*.{restart}")
    nodes = (node for folder in folders for node in heartbeats.read(folder))
    return {heartbeat.rank: node.host for node in nodes for heartbeat in node.heartbeats}


def _started(path: Path, job_id: str, restart: object) -> list[timeline.Rank]:
    """Return the ranks that wrote a timeline in an attempt, since the last restart of the ranks."""
    folders = sorted(
        (path / run_folder.TIMELINE).glob(f"{_step_of(job_id)}.*.{restart}"), key=lambda one: one.stat().st_mtime
    )
    attempt = timeline.read_attempt(folders[-1]) if folders else None
    return list(attempt.ranks) if attempt else []


def _step_of(job_id: str) -> str:
    """Return the job ID as in the names of job steps, or '*' for an array task, whose steps have another ID."""
    return "*" if "_" in job_id else job_id


def _nodes(hosts: Sequence[str]) -> dict[str, str]:
    """Return Slurm's reason for each node that has one: 'Not responding [root@2026-11-21T13:36:23]'."""
    found = scontrol.records(_shown("node", ",".join(hosts)), "NodeName")
    return {node["NodeName"]: node["Reason"] for node in found if node.get("Reason")}


def _down(nodelist: str) -> dict[str, str]:
    """Return the nodes of `nodelist` that are down or unresponsive, with Slurm's reason, from one query."""
    if scontrol.value_or_none(nodelist) is None:
        return {}
    found = scontrol.records(_shown("node", nodelist), "NodeName")
    away = [node for node in found if re.search(r"DOWN|NOT_RESPONDING|FAIL|\*", node.get("State", ""))]
    return {node["NodeName"]: node.get("Reason", "") or node["State"] for node in away}


def _record(what: str, name: str, key: str) -> dict[str, str]:
    """Return the fields of `scontrol show`, such as `scontrol show job 5`.

    Return {} if the controller does not answer or has purged the job.
    """
    return next(iter(scontrol.records(_shown(what, name), key)), {})


def _shown(what: str, name: str) -> str:
    try:
        done = slurm_client.run(["scontrol", "--all", "show", what, name], at_most=LIMIT)
    except slurm_client.Unreachable:
        return ""
    return done.stdout if done.status == 0 else ""


def _text(path: Path) -> str:
    try:
        with safe_files.open_file(path) as file:
            return large_logs.read(file, MOST_OF_JOB_LOG)[0]
    except OSError:
        return ""
