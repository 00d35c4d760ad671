"""`hpcinit doctor [cluster=x ...]`: check the login node and, with `nodes=N`, also N compute nodes in a job.

Exit status: 0 if no check failed, 1 if one failed, 2 if the request is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcinit.base import console
from hpcinit.base.errors import ConfigError, RequestError
from hpcinit.config import compose, overrides
from hpcinit.config.request import Request
from hpcinit.doctor import check_results, job_checks, login_checks
from hpcinit.doctor.check_results import FAIL, OK, WARNING, Check
from hpcinit.observe import find_runs
from hpcinit.records.rank_report import Report

# Output: a table with colors (rich) in a terminal, else plain lines, or JSON.

MOST_ROWS = 64
COLUMNS = ("rank", "host", "device", "uuid", "driver", "NUMA", "cores", "stage")
STYLES = {OK: "green", WARNING: "yellow", FAIL: "bold red"}


def show_table(checks: Sequence[Check], title: str = "", quiet: bool = False) -> None:
    """Print the checks. quiet: only those that are not ok."""
    shown = [check for check in checks if not quiet or check.status != OK]
    out = Console(highlight=False, soft_wrap=True)
    if title:
        out.print(title, markup=False)
    if out.is_terminal and shown:
        out.print(_table(shown), soft_wrap=False)
    else:
        for check in shown:
            out.print(_line(check), markup=False)
    out.print(check_results.count_statuses(checks), markup=False)


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        detail = Text(check.detail)
        if check.advice and check.status != OK:
            detail.append(f"\n-> {check.advice}", style=STYLES[check.status])
        table.add_row(Text(check.status, STYLES[check.status]), Text(check.about), detail)
    return table


def _line(check: Check) -> str:
    advice = f" -> {check.advice}" if check.advice and check.status != OK else ""
    return f"{check.status:8} {check.about}: {check.detail}{advice}"


def show_ranks(reports: Sequence[Report]) -> None:
    """Print each rank with its host and device, and the speed of the all-reduce by size."""
    if not reports:
        return
    out = Console(highlight=False, soft_wrap=True)
    rows = [_rank(report) for report in reports[:MOST_ROWS]]
    used = [number for number, name in enumerate(COLUMNS) if any(row[number] for row in rows)]
    ranks = Table(box=None, pad_edge=False, header_style="bold")
    for number in used:
        ranks.add_column(COLUMNS[number], no_wrap=True)
    for row in rows:
        ranks.add_row(*(Text(row[number]) for number in used))
    out.print(ranks)
    if len(reports) > MOST_ROWS:
        out.print(f"and {len(reports) - MOST_ROWS} more ranks: --json shows all", markup=False)
    for one in (one for report in reports for one in report.all_reduce):
        speed = f"{_size(one.size):>9}  {one.seconds * 1e3:10.3f} ms  {one.bus_gb_s:8.3g} GB/s bus bandwidth"
        out.print(f"all-reduce {speed}", markup=False)


def _rank(report: Report) -> Sequence[str]:
    device = report.device
    name = device.get("name") or device.get("device", "")
    identity = device.get("uuid") or device.get("pci", "")
    return (str(report.rank), report.host, name, identity, report.driver, report.numa, str(report.cpus), report.stage)


def _size(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def document(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the object that --json prints."""
    return {"status": check_results.worst_status(checks), "checks": [asdict(check) for check in checks]}


def main(argv: Sequence[str]) -> int:
    """Run the command with `argv`: overrides as for `hpcinit submit`, and options. Raise RequestError."""
    options = console.parse_arguments(parser(), list(argv))
    if wrong := overrides.not_overrides(options.overrides):
        raise RequestError(f"{wrong[0]!r} is not an override, expected KEY=VALUE as for hpcinit submit")
    if options.run:
        if options.overrides:
            override = options.overrides[0]
            raise RequestError(f"--run {options.run} shows an earlier run, which {override} cannot change: remove it")
        return _of_run(find_runs.find_run(options.run, options.runs_dir), options)
    on_nodes = any(override.lstrip("+").startswith("nodes=") for override in options.overrides)
    if options.remember and not on_nodes:
        raise RequestError("--remember needs results from nodes: add nodes=N, or --run RUN for an earlier run")
    given = job_checks.overrides(options.overrides) if on_nodes else options.overrides
    try:
        [request] = _composed(given)
    except ConfigError as error:
        return _without_config(error, options)
    return _on_nodes(request, argv, options) if on_nodes else _login(request, options)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit doctor", description="Check this login node and the compute nodes")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for hpcinit submit; nodes=N: check N nodes in a job"
    )
    parser.add_argument("--remember", action="store_true", help="exclude nodes that failed from later submissions")
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


def _without_config(error: ConfigError, options: argparse.Namespace) -> int:
    """Print the checks that need no config, and each problem of the config."""
    wrong = [Check("config", FAIL, problem) for problem in error.problems]
    _show([*login_checks.version_checks(None), *wrong], options)
    return error.exit_status


def _login(request: Request, options: argparse.Namespace) -> int:
    checks = list(login_checks.login_checks(request.config, request.document, os.environ))
    _show(checks, options)
    return int(check_results.worst_status(checks) == FAIL)


def _on_nodes(request: Request, argv: Sequence[str], options: argparse.Namespace) -> int:
    """Check the login node; if no check fails, submit the doctor's job and print its results."""
    here = list(login_checks.login_checks(request.config, request.document, os.environ))
    if check_results.worst_status(here) == FAIL:
        console.message("a check failed on this login node, so the doctor's job was not submitted")
        _show(here, options)
        return 1
    status, path = job_checks.submit(request, argv)
    if path is None:
        return status
    if waited := job_checks.wait(path):
        return waited
    return _of_run(path, options, here)


def _of_run(path: Path, options: argparse.Namespace, before: Sequence[Check] = ()) -> int:
    """Print the checks of a run of the doctor's job. before: the checks of the login node."""
    found, reports = job_checks.checks(path)
    every = [*before, *found]
    if options.json:
        print(json.dumps(document(every) | job_checks.document(path, reports)))
    else:
        if not options.quiet:
            show_ranks(reports)
        show_table(every, quiet=options.quiet)
    for line in job_checks.remember(path, found) if options.remember else _hint(found, path):
        console.note(line)
    return int(check_results.worst_status(every) == FAIL)


def _hint(found: Sequence[Check], path: Path) -> list[str]:
    """Return a line that shows how to exclude the faulty nodes, if there are any."""
    faulty = sorted({host for check in found if check.status == FAIL for host in check.hosts})
    run = shlex.quote(str(path))
    names = ", ".join(faulty)
    return [f"to exclude {names} from submissions:  hpcinit doctor --remember --run {run}"] if faulty else []


def _show(checks: Sequence[Check], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(document(checks)))
    else:
        show_table(checks, quiet=options.quiet)
