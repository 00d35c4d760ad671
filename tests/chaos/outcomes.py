"""Write the measured outcome of each fault to chaos.json in docs/development, and to the table in its chaos.md."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs/development"
JSON, TABLE = "chaos.json", "chaos.md"
LAUNCHES = ("srun", "fork")
BEGIN, END = "<!-- written by make chaos -->", "<!-- until here -->"
FOLDER = re.compile(r"/\S*/test_[^/\s]*/")  # the temporary folder of a test
MESSAGE = re.compile(r": `.*`$")  # a message of the day, which a later version may phrase differently
HEAD = (
    "| fault | seconds, `launch=srun` | seconds, `launch=fork` | steps lost, srun | steps lost, fork | end of the run |\n"
    "|---|--:|--:|--:|--:|---|"
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault.

    seconds: from the fault until `hpcinit why` reports it; None if not measured.
    lost: steps that the next attempt repeats, or would repeat; None if not counted.
    """

    fault: str
    launch: str
    first: str
    seconds: float | None
    lost: int | None
    ends: str


def keep(outcome: Outcome, docs: Path = DOCS, load: float | None = None) -> None:
    """Replace the earlier outcome of the same fault."""
    day = datetime.date.today().isoformat()
    seconds = None if outcome.seconds is None else round(outcome.seconds, 1)
    measured = {"seconds": seconds, "day": day}
    measured["load"] = round(os.getloadavg()[0] if load is None else load, 1)
    with locked(docs / JSON) as known:
        known[f"{outcome.fault}, launch={outcome.launch}"] = (
            asdict(outcome) | measured | {"first": FOLDER.sub("/.../", outcome.first)}
        )
        (docs / TABLE).write_text(replaced((docs / TABLE).read_text(), table(known)))


@contextmanager
def locked(path: Path) -> Iterator[dict[str, Any]]:
    """Lock a JSON file, which may not exist yet; yield its content, and write that back. Tests run side by side."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}")
        yield known
        file.seek(0)
        file.truncate()
        file.write(json.dumps(known, indent=1) + "\n")


def table(known: dict[str, dict]) -> str:
    """Return the table, in the order of the file, with a row for each fault."""
    rows = []
    for fault in dict.fromkeys(each["fault"] for each in known.values()):
        by_launch = {each["launch"]: each for each in known.values() if each["fault"] == fault}
        numbers = [_number(by_launch.get(launch, {}).get(key)) for key in ("seconds", "lost") for launch in LAUNCHES]
        ends = dict.fromkeys(MESSAGE.sub("", each["ends"]) for each in by_launch.values())
        rows.append(f"| {' | '.join([fault, *numbers, ' or '.join(ends)])} |")
    loads = [each["load"] for each in known.values()]
    days = sorted({each["day"] for each in known.values()})
    measured = (
        f"Measured on {' and '.join(days)} on 2 cores, at a load average of {min(loads):.0f} to {max(loads):.0f}."
    )
    return "\n".join([measured, "", HEAD, *rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def replaced(page: str, table: str, name: str = TABLE) -> str:
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{name} has no lines {BEGIN!r} and {END!r}, expected both around the table")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
