"""Shows a ledger as text with a bar, as CSV, and as a picture (SVG)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape

from hpcinit.base.text import counted
from hpcinit.report import advice, ledger
from hpcinit.report.advice import hours
from hpcinit.report.ledger import Ledger

WIDTH = 60  # of the bar, in characters
SHOWN = 0.005  # a row with a smaller share is not in the bar
COLORS = {
    ledger.KEPT: "#2f7d32",
    ledger.REPEATED: "#c62828",
    ledger.SAVE: "#1565c0",
    ledger.RESTORE: "#5e92f3",
    ledger.START: "#f9a825",
    ledger.IMPORTS: "#fbc02d",
    ledger.INIT: "#fdd835",
    ledger.FIRST: "#ffee58",
    ledger.PHASES: "#00838f",
    ledger.HANG: "#6a1b9a",
    ledger.END: "#8d6e63",
    ledger.IDLE: "#90a4ae",
    ledger.UNKNOWN: "#bdbdbd",
}


def headline(found: Ledger) -> str:
    """Return the summary, such as '1,240 GPU-hours in 5 attempts (09 Nov 2026 to 14 Nov 2026), 71 % kept steps'."""
    starts = sum(max(1, len(one.starts)) for one in found.allocations)
    days = [datetime.fromtimestamp(at) for one in found.allocations for at in (one.begin, one.end)]
    first, last = (f"{day:%d %b %Y}" for day in (min(days), max(days)))
    when = first if first == last else f"{first} to {last}"
    kept = percent(found, ledger.KEPT)
    return f"{hours(found.unit_s)} {found.unit} in {counted(starts, 'attempt')} ({when}), {kept} kept steps"


def percent(found: Ledger, row: str) -> str:
    """Return a row's share of the charged time: '71 %', or 'between 60 and 75 %' if it is uncertain."""
    low, high = (100 * value / (found.unit_s or 1.0) for value in found.rows[row][1:])
    if high - low > 1:
        return f"between {low:.0f} and {min(high, 100):.0f} %"
    return f"{100 * found.rows[row].at / (found.unit_s or 1.0):.0f} %"


def shares(found: Ledger) -> list[tuple[str, float]]:
    """Return (row, share of the charged time) for the rows that are large enough to show, largest first."""
    every = [(row, amount.at / (found.unit_s or 1.0)) for row, amount in found.rows.items()]
    return sorted((one for one in every if one[1] >= SHOWN), key=lambda one: -one[1])


def bar(found: Ledger) -> str:
    """Return the rows as a bar of blocks, such as '█████ steps 71 %  ██ repeated 14 %'."""
    parts = []
    for row, share in shares(found):
        blocks = "█" * int(share * WIDTH) + "▌" * (share * WIDTH % 1 >= 0.5)
        parts.append(f"{blocks or '▏'} {ledger.NAMES.get(row, row)} {100 * share:.0f} %")
    return "  ".join(parts)


def lines(found: Ledger, title: str = "") -> Iterator[str]:
    """Yield the lines of the report on a ledger.

    title: the text before the summary on the first line.
    """
    yield f"{title}{headline(found)}"
    if not found.unit_s:
        return
    yield bar(found)
    if loss := advice.largest(found):
        yield f"the largest loss: {loss.text}"
    yield from advice.by_node(found)
    yield ""
    widest = max(len(text) for text in ledger.TITLES.values())
    for row, amount in found.rows.items():
        if amount.high > 0 or row == ledger.UNKNOWN:
            within = f"  between {hours(amount.low)} and {hours(amount.high)}" if _is_range(found, amount) else ""
            share = 100 * amount.at / found.unit_s
            yield f"  {ledger.TITLES[row]:{widest}}  {hours(amount.at):>9} {found.unit}  {share:5.1f} %{within}"
    yield f"  {ledger.TITLES[ledger.QUEUE]:{widest}}  {hours(found.queued_s):>9} hours, not charged"


def _is_range(found: Ledger, amount: ledger.Amount) -> bool:
    return amount.high - amount.low > 0.01 * found.unit_s


def attempt_lines(found: Ledger) -> Iterator[str]:
    """Yield an empty line and one line for each allocation. If there is only one allocation, yield nothing."""
    if len(found.allocations) < 2:
        return
    yield ""
    for one in found.allocations:
        kept = 100 * one.rows[ledger.KEPT].at / (one.charged_s or 1.0)
        name = f"{one.job} restart {one.restart}" if one.restart else one.job
        why = advice.WORDS.get(one.reason, one.reason) or one.state.lower()
        yield (
            f"  {datetime.fromtimestamp(one.begin):%Y-%m-%d %H:%M}  {name}: {hours(one.charged_s)} hours on "
            f"{counted(one.nodes, 'node')}, {kept:.0f} % kept steps{', ended by: ' * bool(why)}{why}"
        )


def csv_text(found: Sequence[Ledger]) -> str:
    """Return the ledgers as CSV, with a header and one line for each row of each allocation."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("run", "job", "restart", "begin", "nodes", "gpus", "row", "seconds", "low_s", "high_s"))
    for each in found:
        for one in each.allocations:
            about = (each.name, one.job, one.restart, f"{datetime.fromtimestamp(one.begin):%Y-%m-%dT%H:%M:%S}")
            queued = ledger.Amount(*([one.queued_s or 0.0] * 3))
            for row, amount in {ledger.QUEUE: queued, **one.rows}.items():
                writer.writerow((*about, one.nodes, one.gpus, row, *(f"{value:.3f}" for value in amount)))
    return text.getvalue()


def svg(found: Ledger) -> str:
    """Return a picture of the ledger as SVG: a bar with all rows, and below it one bar per attempt on a time axis."""
    shown, wide, high = found.allocations[-40:], 900, 18
    height = 110 + (high + 6) * len(shown) + 20 * ((len(ledger.ROWS) + 4) // 5)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide + 40}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="20" y="24" font-size="15">{escape(f"{found.name}: {headline(found)}")}</text>',
    ]
    at, rows = 20.0, found.rows
    for row in ledger.ROWS:
        size = wide * rows[row].at / (found.unit_s or 1.0)
        parts.append(_box(row, at, 38, size, 28, f"{ledger.TITLES[row]}: {hours(rows[row].at)} {found.unit}"))
        at += size
    begin, end = found.allocations[0].begin, max(one.end for one in found.allocations)
    scale, y = wide / max(1.0, end - begin), 82
    for one in shown:
        for start in one.starts:
            for part in start.segments:
                x, size = 20 + (part.begin.at - begin) * scale, (part.end.at - part.begin.at) * scale
                parts.append(_box(part.row, x, y, size, high, f"{one.job}: {ledger.TITLES[part.row]}"))
        y += high + 6
    for number, row in enumerate(ledger.ROWS):
        x, below = 20 + 180 * (number % 5), y + 14 + 20 * (number // 5)
        parts.append(_box(row, x, below, 12, 12, row))
        share = 100 * rows[row].at / (found.unit_s or 1.0)
        parts.append(f'<text x="{x + 17}" y="{below + 11}">{escape(ledger.NAMES.get(row, row))} {share:.1f} %</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(row: str, x: float, y: float, width: float, height: float, about: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.0f}" width="{width:.2f}" height="{height:.0f}" fill="{COLORS[row]}">'
        f"<title>{escape(about)}</title></rect>"
    )
