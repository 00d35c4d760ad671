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


def document(checks: Sequence[Check]) -> dict[str, Any]:
    """For --json."""
    return {"grade": checkup.worst(checks), "checks": [asdict(check) for check in checks]}
