"""`hpcinit doctor [cluster=x ...]`: checks the login node and, with `nodes=N`, also N compute nodes in a job.

The exit status is 0 if no check failed, 1 if a check failed, and 2 if the request is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hpcinit.base import console, json_output
from hpcinit.base.errors import INTERRUPTED, ConfigError, RequestError
from hpcinit.config import compose, overrides
from hpcinit.config.request import Request
from hpcinit.doctor import link_diagnosis, login_checks, node_diagnosis
from hpcinit.engine import from_record
from hpcinit.observe import find_runs, state
from hpcinit.records import check_results, job_record, node_records, rank_report, run_folder, spec
from hpcinit.records.check_results import FAIL, OK, WARNING, Check
from hpcinit.records.node_records import NodeFailure
from hpcinit.records.rank_report import Report
from hpcinit.submit import submit_command
from hpcinit.why import why_command

# The defaults of the doctor's job. A short job waits less in the queue. A failure is a result, so there is no restart.
JOB_DEFAULTS = {"time_min": "15", "restart.max_restarts": "0"}
STYLES = {OK: "green", WARNING: "yellow", FAIL: "bold red"}


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status. Raise RequestError if the request is wrong.

    argv: the command's options, and overrides as for `hpcinit submit`.
    """
    options = console.parse_arguments(parser(), list(argv))
    if wrong := overrides.not_overrides(options.overrides):
        raise RequestError(f"{wrong[0]!r} is not an override, expected KEY=VALUE as for hpcinit submit")
    if options.run:
        if options.overrides:
            override = options.overrides[0]
            raise RequestError(f"--run {options.run} shows an earlier run, so {override} has no effect: remove it")
        return _of_run(find_runs.find_run(options.run, options.runs_dir), options)
    on_nodes = any(override.lstrip("+").startswith("nodes=") for override in options.overrides)
    if options.remember and not on_nodes:
        raise RequestError("--remember needs results from nodes: add nodes=N, or --run RUN for an earlier run")
    given = job_overrides(options.overrides) if on_nodes else options.overrides
    try:
        [request] = _composed(given)
    except ConfigError as error:
        problems = [Check("config", FAIL, problem) for problem in error.problems]
        _show([*login_checks.version_checks(None), *problems], options)
        return error.exit_status
    here = list(login_checks.login_checks(request.config, request.document, os.environ))
    failed = check_results.worst_status(here) == FAIL
    if failed or not on_nodes:
        if on_nodes:
            console.message("a check failed on this login node, so the doctor's job was not submitted")
        _show(here, options)
        return int(failed)
    status, path = _submit(request, argv)
    if path is None:
        return status
    if status == INTERRUPTED:
        console.note(f"see its results later with:  hpcinit doctor --run {shlex.quote(str(path))}")
        return status
    return _of_run(path, options, here)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit doctor", description="Check this login node and the compute nodes")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for hpcinit submit; nodes=N: check N nodes in a job"
    )
    parser.add_argument("--remember", action="store_true", help="exclude faulty nodes from later submissions")
    parser.add_argument("--run", metavar="RUN", help="show the results of an earlier run: its folder, name or job id")
    find_runs.add_runs_dir(parser)
    return console.add_verbosity_options(parser)


def _composed(overrides: Sequence[str]) -> Sequence[Request]:
    found: list[Request] = []

    def keep(requests: Sequence[Request]) -> int:
        found.extend(requests)
        return 0

    compose.main(overrides, lambda _: None, keep)
    return found


def _of_run(path: Path, options: argparse.Namespace, before: Sequence[Check] = ()) -> int:
    """Print the checks of a doctor job that has ended, and return the exit status.

    before: the checks of the login node.
    """
    found, reports = checks_of_run(path)
    every = [*before, *found]
    _show(every, options, path, reports)
    for line in remember(path, found) if options.remember else _hint(found, path):
        console.note(line)
    return int(check_results.worst_status(every) == FAIL)


def _hint(found: Sequence[Check], path: Path) -> list[str]:
    """Return a line that shows how to exclude the faulty nodes, or [] if no node is faulty."""
    faulty = sorted({host for check in found if check.status == FAIL for host in check.hosts})
    run = shlex.quote(str(path))
    names = ", ".join(faulty)
    return [f"to exclude {names} from submissions:  hpcinit doctor --remember --run {run}"] if faulty else []


def job_overrides(given: Sequence[str]) -> list[str]:
    """Return the overrides of the doctor's job: the defaults, the user's overrides, wait=true and job=doctor."""
    keys = {override.lstrip("+").partition("=")[0] for override in given}
    defaults = [f"{key}={value}" for key, value in JOB_DEFAULTS.items() if key not in keys]
    return [*defaults, *given, "wait=true", "job=doctor"]


def _submit(request: Request, argv: Sequence[str]) -> tuple[int, Path | None]:
    """Submit the job and wait for it, as `hpcinit submit wait=true` does. Return the exit status, and the run folder.

    If there is no job, the folder is None. The output goes to stderr. With -q it is discarded.
    """
    runs: dict[int, Path] = {}
    with contextlib.redirect_stdout(io.StringIO() if console.quiet() else sys.stderr):
        status = submit_command.submit_all([request], ["hpcinit", "doctor", *argv], runs)
    return status, runs.get(request.number)


def checks_of_run(path: Path) -> tuple[list[Check], list[Report]]:
    """Return the checks and the reports of the run in the folder `path`. The run may still be running."""
    submitted, reports = spec.load(path / run_folder.SPEC), rank_report.read(path)
    found = list(node_diagnosis.check_nodes(reports, submitted.nodes, submitted.ranks_per_node))
    found += link_diagnosis.check_links(reports)
    now = state.read(path)
    return [*found, *_end_of_job(path, now)], reports


def _end_of_job(path: Path, now: state.State) -> Iterator[Check]:
    """Yield a check about how the job ended. If it failed, the check has the verdict of `hpcinit why`."""
    if now.name == "COMPLETED":
        yield Check("job", OK, f"{now.job_id} completed")
        return
    verdict = why_command.explain_run(path, now)
    advice = verdict.do or f"hpcinit why {shlex.quote(str(path))}"
    yield Check("job", FAIL if now.over else WARNING, f"{now.job_id} is {now.name}: {verdict.headline}", advice)


def remember(path: Path, found: Sequence[Check]) -> list[str]:
    """Add the faulty nodes to the cluster's table of excluded nodes. Return a line for the user about each node.

    path: the run folder.
    found: the checks of the run.
    """
    record = job_record.submission(path)
    cluster, job = str(record.get("cluster", "")), str(record.get("job_id", ""))
    faulty = {host: check for check in reversed(found) if check.status == FAIL for host in check.hosts}
    if not from_record(record).other_machines:
        return [f"cluster {cluster} has no nodes to exclude, so --remember had no effect"] if faulty else []
    table = node_records.file(os.environ, cluster)
    failures = [
        NodeFailure(time.time(), host, node_records.DOCTOR, str(path.absolute()), job, f"{check.about}: {check.detail}")
        for host, check in faulty.items()
    ]
    node_records.append(table, node_records.new_record(failures, node_records.read(table)))
    return [f"{host} is excluded from submissions; to undo: hpcinit nodes --forget {host}" for host in faulty]


def _show(
    checks: Sequence[Check], options: argparse.Namespace, path: Path | None = None, reports: Sequence[Report] = ()
) -> None:
    """Print the checks, and the reports if the doctor's job ran. With --json, print both as one object."""
    if not options.json:
        if not options.quiet:
            show_all_reduce(reports)
        show_checks(checks, options.quiet)
        return
    record = {} if path is None else job_record.submission(path)
    sizes = [one for report in reports for one in report.all_reduce]
    fields = {
        "status": check_results.worst_status(checks),
        "checks": [asdict(check) for check in checks],
        "run": None if path is None else str(path),
        "job_id": str(record.get("job_id", "")),
        "cluster": str(record.get("cluster", "")),
        "all_reduce": [asdict(one) | {"bus_gb_s": one.bus_gb_s} for one in sizes],
        "ranks": [asdict(report) for report in reports],
    }
    print(json_output.line("doctor", fields))


def show_checks(checks: Sequence[Check], quiet: bool) -> None:
    """Print a line for each check.

    quiet: print only checks that are not ok.
    """
    out = Console(highlight=False, soft_wrap=True, color_system=console.color_system())
    for check in checks:
        if not quiet or check.status != OK:
            advice = f" -> {check.advice}" if check.advice and check.status != OK else ""
            text = Text.assemble((f"{check.status:8}", STYLES[check.status]), f" {check.about}: {check.detail}{advice}")
            out.print(text)
    out.print(check_results.count_statuses(checks), markup=False)


def show_all_reduce(reports: Sequence[Report]) -> None:
    """Print how fast the all-reduce was for each size."""
    for one in (one for report in reports for one in report.all_reduce):
        speed = f"{_size(one.size):>9}  {one.seconds * 1e3:10.3f} ms  {one.bus_gb_s:8.3g} GB/s bus bandwidth"
        print(f"all-reduce {speed}")


def _size(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
