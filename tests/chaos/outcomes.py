"""What came of each fault, as the suite measured it: docs/chaos.json, and the table of it in docs/chaos.md."""

from __future__ import annotations

import datetime
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
JSON, TABLE = "chaos.json", "chaos.md"
BEGIN, END = "<!-- written by make chaos -->", "<!-- until here -->"
FOLDER = re.compile(r"/\S*/test_[^/\s]*/")  # of one test, which says nothing to others
HEAD = (
    "| fault | `launch` | the first line of `hpcinit why` | s until it says so | steps lost | how it ends |\n"
    "|---|---|---|--:|--:|---|"
)


@dataclass(frozen=True)
class Outcome:
    """seconds: from the fault until `hpcinit why` tells of it; None where it was not asked then.

    lost: steps that are done again, or, after an end, would be by the next attempt; None where nobody has counted.
    """

    fault: str
    launch: str
    first: str
    seconds: float | None
    lost: int | None
    ends: str


def keep(outcome: Outcome, docs: Path = DOCS, load: float | None = None) -> None:
    """Puts it in the place of what was measured of the same fault before; the others stay."""
    path = docs / JSON
    known = json.loads(path.read_text()) if path.exists() else {}
    day = datetime.date.today().isoformat()
    seconds = None if outcome.seconds is None else round(outcome.seconds, 1)
    measured = {"seconds": seconds, "day": day}
    measured["load"] = round(os.getloadavg()[0] if load is None else load, 1)
    known[f"{outcome.fault}, launch={outcome.launch}"] = (
        asdict(outcome) | measured | {"first": FOLDER.sub("/.../", outcome.first)}
    )
    path.write_text(json.dumps(known, indent=1) + "\n")
    (docs / TABLE).write_text(replaced((docs / TABLE).read_text(), table(known)))


def table(known: dict[str, dict]) -> str:
    """In the order of the file, which is that of the first run of each fault; one launch below the other."""
    faults = list(dict.fromkeys(each["fault"] for each in known.values()))
    rows = [
        f"| {each['fault']} | {each['launch']} | {_cell(each['first'])} | {_number(each['seconds'])} | "
        f"{_number(each['lost'])} | {each['ends']} |"
        for each in sorted(known.values(), key=lambda each: faults.index(each["fault"]))
    ]
    loads = [each["load"] for each in known.values()]
    days = sorted({each["day"] for each in known.values()})
    told = (
        f"Measured on {' and '.join(days)}; load average of the machine's 2 cores {min(loads):.0f} to {max(loads):.0f}."
    )
    return "\n".join([told, "", HEAD, *rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _cell(text: str) -> str:
    return "`" + text.replace("|", "/").replace("`", "'") + "`"


def replaced(page: str, table: str, name: str = TABLE) -> str:
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{name} has no lines {BEGIN!r} and {END!r}, between which the table goes")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
