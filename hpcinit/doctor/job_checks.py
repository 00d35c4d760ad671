"""Submit the doctor's job (job=doctor), wait for it, and check the reports of its ranks."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from hpcinit.base import console
from hpcinit.base.errors import INTERRUPTED
from hpcinit.config.request import Request
from hpcinit.doctor import link_diagnosis, node_diagnosis
from hpcinit.doctor.check_results import FAIL, OK, WARNING, Check
from hpcinit.observe import state
from hpcinit.observe.poll import Poll
from hpcinit.records import node_records, rank_report, run_folder, spec
from hpcinit.records.node_records import NodeFailure
from hpcinit.records.rank_report import Report
from hpcinit.submit import submit_command
from hpcinit.why import why_command

# A short job waits less in the queue. A failure is a result, so the job is not restarted.
DEFAULTS = {"time_min": "15", "restart.max_restarts": "0"}
POLL_S = 0.5


def overrides(given: Sequence[str]) -> list[str]:
    """Return the overrides of the doctor's job: the defaults, those `given`, and job=doctor."""
    keys = {override.lstrip("+").partition("=")[0] for override in given}
    return [*(f"{key}={value}" for key, value in DEFAULTS.items() if key not in keys), *given, "job=doctor"]


def submit(request: Request, argv: Sequence[str]) -> tuple[int, Path | None]:
    """Submit the job as `hpcinit submit` does; return the exit status, and the run folder if there is one.

    The output of the submission goes to stderr, or with -q nowhere.
    """
    runs: dict[int, Path] = {}
    with contextlib.redirect_stdout(io.StringIO() if console.quiet() else sys.stderr):
        status = submit_command.submit_all([request], ["hpcinit", "doctor", *argv], runs)
    return status, runs.get(request.number)


def wait(path: Path) -> int:
    """Wait until the run has ended. Return 0, or 130 after Ctrl-C."""
    out = Console(stderr=True, quiet=console.quiet(), highlight=False, soft_wrap=True)
    poll, shown, started = Poll(path), "", time.monotonic()
    try:
        with out.status("") as line:
            while not poll.ask():
                now = f"{poll.now.name} {poll.now.reason}".strip()
                if now != shown and not out.is_terminal:
                    out.print(f"[{time.monotonic() - started:.0f} s] {now}", markup=False)
                shown = now
                line.update(f"{now}  {time.monotonic() - started:.0f} s")
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        run = shlex.quote(str(path))
        console.note(f"stopped waiting; the job is still running. See its results with:  hpcinit doctor --run {run}")
        console.note(f"cancel it with:  hpcinit cancel {run}")
        return INTERRUPTED
    return 0


def checks(path: Path) -> tuple[list[Check], list[Report]]:
    """Return the checks and reports of the run in the folder `path`, also of one that has not ended."""
    submitted, reports = spec.load(path / run_folder.SPEC), rank_report.read(path)
    found = list(node_diagnosis.check_nodes(reports, submitted.nodes, submitted.ranks_per_node))
    found += link_diagnosis.check_links(reports)
    now = state.read(path)
    return [*found, *_end(path, now)], reports


def _end(path: Path, now: state.State) -> Iterator[Check]:
    """Yield a check of how the job ended, with the verdict of `hpcinit why` if it failed."""
    if now.name == "COMPLETED":
        yield Check("job", OK, f"{now.job_id} completed")
        return
    verdict = why_command.explain_run(path, now)
    advice = verdict.do or f"hpcinit why {shlex.quote(str(path))}"
    yield Check("job", FAIL if now.over else WARNING, f"{now.job_id} is {now.name}: {verdict.headline}", advice)


def remember(path: Path, found: Sequence[Check]) -> list[str]:
    """Add the faulty nodes to the cluster's table of excluded nodes. Return a line about each for the user."""
    record = state.submission(path)
    cluster, job = str(record.get("cluster", "")), str(record.get("job_id", ""))
    faulty = {host: check for check in reversed(found) if check.status == FAIL for host in check.hosts}
    if record.get("engine") != "slurm":
        return [f"cluster {cluster} has no nodes to exclude, so --remember had no effect"] if faulty else []
    table = node_records.file(os.environ, cluster)
    failures = [
        NodeFailure(time.time(), host, node_records.DOCTOR, str(path.absolute()), job, f"{check.about}: {check.detail}")
        for host, check in faulty.items()
    ]
    node_records.append(table, node_records.new_record(failures, node_records.read(table)))
    return [f"{host} is excluded from submissions; to undo: hpcinit nodes --forget {host}" for host in faulty]


def document(path: Path, reports: Sequence[Report]) -> dict[str, Any]:
    """Return what --json prints in addition to the checks."""
    record = state.submission(path)
    sizes = [one for report in reports for one in report.all_reduce]
    return {
        "run": str(path),
        "job_id": str(record.get("job_id", "")),
        "cluster": str(record.get("cluster", "")),
        "all_reduce": [asdict(one) | {"bus_gb_s": one.bus_gb_s} for one in sizes],
        "ranks": [asdict(report) for report in reports],
    }
