"""report.html: one page that needs nothing else, with a lane for each rank or node. page.html is its frame."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpcinit.facts import runfolder
from hpcinit.facts.timeline import MOMENTS
from hpcinit.observe.report import phases, text
from hpcinit.observe.report.phases import NAMES, Phase, Report

FRAME = Path(__file__).parent / "page.html"
BAR = 160  # width of a phase's bar in its table, in pixels


def render(run: Path, reports: Sequence[Report], file: Path) -> str:
    """The page as it will lie in `file`: links to logs are relative to that."""
    logs = quote(os.path.relpath(run / runfolder.LOGS, file.parent))
    there = {path.name for path in (run / runfolder.LOGS).glob("rank-*.log")}
    data = {
        "phases": [{"ends": ends, "name": name, "waits": waits} for ends, (name, waits) in NAMES.items()],
        "moments": list(MOMENTS),
        "logs": logs,
        "attempts": [_data(report, there) for report in reports],
    }
    parts = {
        "TITLE": escape(f"{run.absolute().name}: how it started"),
        "SECTIONS": "\n".join(_section(number, reports) for number in range(len(reports))),
        # "<" could end the script element
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], FRAME.read_text(encoding="utf-8"))


def _section(number: int, reports: Sequence[Report]) -> str:
    report = reports[number]
    heading = f"Attempt {number + 1} of {len(reports)}: " if len(reports) > 1 else ""
    longest = max((phase.most for phase in report.phases if phase.ends != phases.QUEUE), default=0.0)
    rows = "".join(_row(report, phase, longest) for phase in report.phases)
    heads = "".join(
        f"<th scope=col>{escape(name)}</th>" for name in (*text.HEAD[:5], "min | median | max", text.HEAD[5])
    )
    bad = "".join(f"<li class=bad>{escape(line)}</li>" for line in phases.missing(report))
    notes = "".join(f"<li>{escape(line)}</li>" for line in (text.timeout(report), text.clocks(report)) if line)
    opened = " open" * (number == len(reports) - 1)
    return (
        f"<details class=attempt{opened}><summary><h2>{escape(heading + text.headline(report))}</h2></summary>"
        f"<ul class=notes>{bad}{notes}</ul>"
        f'<div class=chart data-attempt="{number}"><noscript>The lanes need JavaScript.</noscript></div>'
        f"<div class=scroll><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p class=small>* most of this is waiting for others, grey in the lanes</p></details>"
    )


def _row(report: Report, phase: Phase, longest: float) -> str:
    name, *numbers, about = text.row(report, phase)
    cells = "".join(f"<td class=n>{escape(number)}</td>" for number in numbers)
    drawn = _bar(phase, longest) if phase.ends != phases.QUEUE else ""
    label = f"<span class=key data-phase={phase.ends}></span>{escape(name)}"
    return f"<tr><th scope=row>{label}</th>{cells}<td>{drawn}</td><td class=about>{escape(about)}</td></tr>"


def _bar(phase: Phase, longest: float) -> str:
    """A line from the quickest rank to the slowest, with a mark at the median."""
    left, middle, right = (
        max(0.0, value) / longest * BAR if longest else 0.0 for value in (phase.least, phase.median, phase.most)
    )
    return (
        f"<svg width={BAR + 4} height=14 aria-hidden=true><line class=rule x1=2 x2={BAR + 2} y1=7 y2=7 />"
        f'<rect data-phase={phase.ends} x="{left + 1:.1f}" y=3 width="{max(2.0, right - left):.1f}" height=8 rx=2 />'
        f'<line class=median x1="{middle + 2:.1f}" x2="{middle + 2:.1f}" y1=0 y2=14 /></svg>'
    )


def _data(report: Report, logs: set[str]) -> dict[str, Any]:
    """Moments in whole milliseconds since the first that any rank has of the job itself; -1 where a rank has none."""
    attempt = report.attempt
    hosts = list(dict.fromkeys([*attempt.hosts, *report.hosts.values()]))
    index = {host: at for at, host in enumerate(hosts)}
    begins = [moment for rank in attempt.ranks for name, moment in rank.moments.items() if name != "submitted"]
    zero = min(begins, default=0.0)
    ranks = []
    for rank in attempt.ranks:
        at = [round(1000 * (rank.moments[name] - zero)) if name in rank.moments else -1 for name in MOMENTS]
        at[0] = -1  # the queue, which may be days, is in the table
        ranks.append([rank.rank, index[rank.host], *at])
    without = sorted({rank.rank for rank in attempt.ranks if f"rank-{rank.rank}.log" not in logs})
    silent = [index[host] for host in report.silent_hosts]
    return {"hosts": hosts, "ranks": ranks, "absent": attempt.absent, "silent": silent, "nologs": without}
