"""Checks as a table with colours (rich, where there is a terminal; NO_COLOR), as plain lines, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcinit.facts import checkup
from hpcinit.facts.checkup import BAD, OK, WARNING, Check
from hpcinit.facts.rank_report import Report

MOST_ROWS = 64
COLUMNS = ("rank", "host", "device", "uuid", "driver", "NUMA", "cores", "stage")
STYLES = {OK: "green", WARNING: "yellow", BAD: "bold red"}


def show(checks: Sequence[Check], title: str = "", quiet: bool = False) -> None:
    """quiet: only what is not well."""
    shown = [check for check in checks if not quiet or check.grade != OK]
    out = Console(highlight=False, soft_wrap=True)
    if title:
        out.print(title, markup=False)
    if out.is_terminal and shown:
        out.print(_table(shown), soft_wrap=False)
    else:
        for check in shown:
            out.print(_line(check), markup=False)
    out.print(checkup.count(checks), markup=False)


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        said = Text(check.said)
        if check.do and check.grade != OK:
            said.append(f"\n-> {check.do}", style=STYLES[check.grade])
        table.add_row(Text(check.grade, STYLES[check.grade]), Text(check.about), said)
    return table


def _line(check: Check) -> str:
    do = f" -> {check.do}" if check.do and check.grade != OK else ""
    return f"{check.grade:8} {check.about}: {check.said}{do}"


def show_ranks(reports: Sequence[Report]) -> None:
    """Who is where, with what; and the all-reduce by size."""
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
        words = f"{_size(one.size):>9}  {one.seconds * 1e3:10.3f} ms  {one.bus_gb_s:8.3g} GB/s bus bandwidth"
        out.print(f"all-reduce {words}", markup=False)


def _rank(report: Report) -> Sequence[str]:
    device = report.device
    name = device.get("name") or device.get("device", "")
    identity = device.get("uuid") or device.get("pci", "")
    return (str(report.rank), report.host, name, identity, report.driver, report.numa, str(report.cpus), report.stage)


def _size(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def document(checks: Sequence[Check]) -> dict[str, Any]:
    """For --json."""
    return {"grade": checkup.worst(checks), "checks": [asdict(check) for check in checks]}
