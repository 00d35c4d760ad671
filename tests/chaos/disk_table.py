"""Write the measured effects of full disks to full_disks.json in docs/development, and to its full-disks.md."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos.outcomes import DOCS, replaced

JSON, PAGE = "full_disks.json", "full-disks.md"
HEAD = "| full disk | when | what happens |\n|---|---|---|"


def keep(disk: str, phase: str, outcome: str, docs: Path = DOCS) -> None:
    """Replace the outcome of this disk and phase."""
    path = docs / JSON
    known = json.loads(path.read_text()) if path.exists() else {}
    known.setdefault(disk, {})[phase] = outcome
    path.write_text(json.dumps(known, indent=1) + "\n")
    (docs / PAGE).write_text(replaced((docs / PAGE).read_text(), table(known), PAGE))


def table(known: dict[str, dict[str, str]]) -> str:
    """Return the table, with one row for all phases of a disk that have the same outcome."""
    rows = [HEAD]
    for disk, phases in known.items():
        for outcome in dict.fromkeys(phases.values()):
            when = ", ".join(phase for phase, each in phases.items() if each == outcome)
            rows.append(f"| {disk} | {when} | {outcome} |")
    return "\n".join(rows)
