"""Write the verdicts on each kind of exit to exits.json in docs/development, and to the table in kinds-of-exit.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.chaos import outcomes
from tests.chaos.outcomes import DOCS, replaced

JSON, PAGE = "exits.json", "kinds-of-exit.md"
LAUNCHES = ("srun", "fork", "torchrun")
HEAD = (
    "| what rank 3 does | first line of `hpcinit why` | `kind` | right, of the tried | s until the job ends |\n"
    "|---|---|---|--:|--:|"
)


def keep(fault: str, kind: str, launch: str, outcome: Mapping[str, object], docs: Path = DOCS) -> None:
    """Replace the outcome of this fault under this launch. kind: 'init' or 'plain'."""
    with outcomes.locked(docs / JSON) as known:
        known.setdefault(fault, {})[f"{kind} {launch}"] = dict(outcome)
        (docs / PAGE).write_text(replaced((docs / PAGE).read_text(), table(known), PAGE))


def table(known: Mapping[str, Mapping[str, Mapping[str, object]]]) -> str:
    """Return the table: a row for each fault, with the line under launch=srun, and in how many of the tried
    combinations rank and kind were right."""
    rows = [HEAD]
    for fault, found in known.items():
        first = found.get("init srun") or next(iter(found.values()))
        seconds = [float(str(outcome["seconds"])) for outcome in found.values() if outcome["seconds"] is not None]
        spread = f"{min(seconds):.0f}-{max(seconds):.0f}" if seconds else ""
        right = f"{sum(bool(outcome['right']) for outcome in found.values())} of {len(found)}"
        rows.append(f"| {fault} | `{str(first['line']).replace('|', '/')}` | `{first['kind']}` | {right} | {spread} |")
    return "\n".join(rows)
