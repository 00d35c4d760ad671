"""What is left of a run that failed: its records and logs, the words of its batch script, and what Slurm knows."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpcinit.base import background_writer
from hpcinit.observe import logs, progress, state
from hpcinit.records import error_records, hang_report, heartbeats, job_log, run_folder, spec
from hpcinit.records.error_records import Found
from hpcinit.slurm import scontrol, slurm_client
from hpcinit.why import flight_recorder, hang_verdict
from hpcinit.why.evidence import Evidence, clocks

LIMIT = timedelta(seconds=15)  # for scontrol: a verdict without it is better than a long wait
TAIL_BYTES = 4096  # of each rank's log
MOST_LOGS = 1024
# Words in a rank's log that are not the rank's, or say nothing of an end.
_NOT_LAST = re.compile(r"^(slurmstepd\S*:|srun:|hpcinit: |\[W)|^\s*$")


def gather(path: Path, now: state.State) -> Evidence:
    """Of the last attempt of the run in `path`. now: its state, as asked before."""
    attempt = _json(path / run_folder.EXIT)
    job_id = str(attempt.get("job", "")) or now.job_id
    restart = attempt.get("restart")
    # The log first: a rank whose end it tells of has left its record by then.
    log = job_log.read(_text(path / run_folder.JOB_LOG), spec.ranks_per_task(path))
    every = list(error_records.read(path / run_folder.ERRORS))
    found = error_records.of_last_attempt(every, job_id, restart if isinstance(restart, int) else None)
    slurm = now.engine == "slurm" and not now.away  # which each question would wait for again
    job = _record("job", job_id, "JobId") if slurm else {}
    tails, oom = _tails(path, {one.record.rank for one in found})
    if oom and not log.oom:
        log = replace(log, oom=oom)
    gone = now.name == "NODE_FAIL" or (log.cancelled is not None and log.cancelled.why == "NODE FAILURE")
    silent = now.again and log.cancelled is None  # taken from its nodes, and nobody was there to say so
    nodes = _nodes(log.lost) if slurm and log.lost else {}
    if slurm and (gone or silent) and not log.lost:  # with the batch script's node nobody is left to say which it was
        nodes = _down(",".join(_hosts(path, job_id, restart)) if now.again else job.get("NodeList", ""))
    told = progress.read(path)
    return Evidence(
        state="NODE_FAIL" if silent and nodes else now.name,
        reason=now.reason,
        exit_status=now.exit_status if now.exit_status is not None else state.exit_status(path),
        who=now.reason.partition("by ")[2] if now.name == "CANCELLED" else "",
        found=found,
        log=log,
        clocks=clocks(_differences(path, found)),
        nodes=nodes,
        hang=hang_report.left(path, job_id, restart),
        flight=hang_verdict.verdict(
            flight_recorder.read_attempt(path, job_id, restart), _hosts_by_rank(path, job_id, restart)
        ),
        tails=tails,
        step=max([int(told.get("step", -1)), *(one.record.step for one in found)]),
        time_min=scontrol.minutes(job.get("TimeLimit")),
    )


def age_s(path: Path, found: Evidence) -> float:
    """Seconds since the newest of what the ranks and the batch script have left."""
    written = [one.written for one in found.found]
    with contextlib.suppress(OSError):
        written.append((path / run_folder.JOB_LOG).stat().st_mtime)
    return time.time() - max(written, default=0.0)


def unwritable(path: Path) -> str:
    """Why nothing can be written in the run folder now: 'No space left on device', a quota, or a file server's error;
    '' where it can, and where it is not ours to write."""
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


def _tails(path: Path, recorded: set[int]) -> tuple[dict[int, str], str]:
    """The last words of ranks that left no record; and Slurm's of the kernel's OOM killer, in whichever log."""
    words: dict[int, str] = {}
    oom = ""
    for rank in logs.ranks(path)[:MOST_LOGS]:
        lines = _end(logs.of_rank(path, rank))
        oom = oom or job_log.oom(lines)
        last = next((line.strip() for line in reversed(lines) if not _NOT_LAST.match(line)), "")
        if last and rank not in recorded:
            words[rank] = last
    return words, oom


def _end(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _hosts(path: Path, job_id: str, restart: object) -> list[str]:
    """Nodes on which ranks of that attempt have told of themselves."""
    return sorted(set(_hosts_by_rank(path, job_id, restart).values()))


def _hosts_by_rank(path: Path, job_id: str, restart: object) -> dict[int, str]:
    """The node of each rank of an attempt, from the heartbeats."""
    job = "*" if "_" in job_id else job_id  # of a task: steps have another number of Slurm's
    folders = (path / heartbeats.FOLDER).glob(f"{job}.*.{restart}")
    return {beat.rank: node.host for folder in folders for node in heartbeats.read(folder) for beat in node.beats}


def _nodes(hosts: Sequence[str]) -> dict[str, str]:
    """'Not responding [root@2026-11-21T13:36:23]' by node, of those of which Slurm says something."""
    found = scontrol.records(_shown("node", ",".join(hosts)), "NodeName")
    return {node["NodeName"]: node["Reason"] for node in found if node.get("Reason")}


def _down(nodelist: str) -> dict[str, str]:
    """Nodes of `nodelist` that are down or do not answer, with Slurm's reason, from one question."""
    if scontrol.told(nodelist) is None:
        return {}
    found = scontrol.records(_shown("node", nodelist), "NodeName")
    away = [node for node in found if re.search(r"DOWN|NOT_RESPONDING|FAIL|\*", node.get("State", ""))]
    return {node["NodeName"]: node.get("Reason", "") or node["State"] for node in away}


def _record(what: str, name: str, key: str) -> dict[str, str]:
    """`scontrol show job 5`: {} where it does not answer, or has forgotten it."""
    return next(iter(scontrol.records(_shown(what, name), key)), {})


def _shown(what: str, name: str) -> str:
    try:
        done = slurm_client.run(["scontrol", "--all", "show", what, name], at_most=LIMIT)
    except slurm_client.Unreachable:
        return ""
    return done.stdout if done.status == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
