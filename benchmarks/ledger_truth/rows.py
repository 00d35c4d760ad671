"""The rows of a ledger, and the comparison of a report with the truth."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = (
    "start", "imports", "init", "first_step", "steps_kept", "steps_repeated", "save", "restore", "evaluation", "hang",
    "end", "idle_spares", "unknown",
)  # fmt: skip
STARTUP = ("start", "imports", "init", "restore", "first_step")
POINTS = 5.0  # allowed difference of a row of a job that hpcinit did not submit, in percentage points
CHARGED_S = 1.0  # allowed difference of an attempt from sacct's elapsed time
CHARGED_SHARE, UNKNOWN_SHARE = 0.005, 0.02


@dataclass(frozen=True)
class Difference:
    """A row of a report and its truth, in seconds of the run, and the error in percentage points of the run's time."""

    case: str
    row: str
    truth: float
    reported: float
    low: float
    high: float
    charged: float

    @property
    def points(self) -> float:
        return 100 * (self.reported - self.truth) / self.charged if self.charged else 0.0

    @property
    def inside(self) -> bool:
        slack = max(1.0, 0.002 * self.charged)
        return self.low - slack <= self.truth <= self.high + slack

    @property
    def width(self) -> float:
        """The width of the range in percentage points."""
        return 100 * (self.high - self.low) / self.charged if self.charged else 0.0

    @property
    def holds(self) -> bool:
        return abs(self.points) <= POINTS or self.inside


def held_apart(names: Sequence[str], seed: int) -> set[str]:
    """Draw a third of the cases."""
    return set(random.Random(seed).sample(sorted(names), len(names) // 3))


def differences(case: Path) -> list[Difference]:
    """Compare report.json and truth.json of a case."""
    truth = json.loads((case / "truth.json").read_text())
    report = json.loads((case / "report.json").read_text())
    rows = {row["name"]: row for row in report.get("rows", ())}
    zero = {"seconds": 0.0, "low_s": 0.0, "high_s": 0.0}
    found = []
    for name in ROWS:
        row = rows.get(name, zero)
        found.append(
            Difference(
                case.name, name, truth["rows"].get(name, 0.0), row["seconds"], row["low_s"], row["high_s"],
                truth["charged_s"],
            )
        )  # fmt: skip
    return found


def merged(found: Sequence[Difference]) -> list[Difference]:
    """Return the rows with the start-up as one row, and without `unknown`, which takes part in the other rows' ranges.

    The logs of a program without hpcinit seldom show where one phase of the start-up ends.
    """
    parts = [each for each in found if each.row in STARTUP]
    one = Difference(
        parts[0].case, "startup", sum(each.truth for each in parts), sum(each.reported for each in parts),
        sum(each.low for each in parts), min(parts[0].charged, sum(each.high for each in parts)), parts[0].charged,
    )  # fmt: skip
    return [one, *(each for each in found if each.row not in (*STARTUP, "unknown"))]


def attempt_errors(case: Path) -> list[tuple[str, float, float]]:
    """Return of each allocation its name, sacct's elapsed seconds, and what the report attributes to it."""
    truth = json.loads((case / "truth.json").read_text())
    report = json.loads((case / "report.json").read_text())
    found = []
    left = list(report.get("attempts", ()))
    for number, allocation in enumerate(truth["allocations"]):
        mine = [
            each for each in left if allocation["start"] - 1.5 <= (each["start"] + each["end"]) / 2
            <= allocation["end"] + 1.5 and each["job"].split(".")[0].split("_")[0] in (allocation["job"], "")
        ]  # fmt: skip
        left = [each for each in left if each not in mine]
        name = f"{allocation['job']}#{number}"
        found.append((name, float(allocation["elapsed"]), sum(each["end"] - each["start"] for each in mine)))
    found += [(f"{each['job']}: not in sacct", 0.0, each["end"] - each["start"]) for each in left]
    return found


def summary(all_differences: Iterable[Difference]) -> list[str]:
    """Return a table: each row's mean and largest error, and how many are within 1, 2 and 5 points."""
    by_row: dict[str, list[Difference]] = {}
    for each in all_differences:
        by_row.setdefault(each.row, []).append(each)
    lines = [f"{'row':15}{'cases':>6}{'mean |e|':>9}{'p90':>7}{'max':>7}{'>1':>5}{'>2':>5}{'>5':>5}"
             f"{'misses':>8}{'width':>7}  (points)"]  # fmt: skip
    for name in ("startup", *ROWS):
        rows = [each for each in by_row.get(name, []) if each.truth > 0 or each.reported > 0 or each.high > 0]
        if not rows:
            continue
        errors = sorted(abs(each.points) for each in rows)
        beyond = [sum(error > limit for error in errors) for limit in (1, 2, 5)]
        misses = sum(not each.holds for each in rows)
        width = statistics.mean(each.width for each in rows)
        lines.append(
            f"{name:15}{len(rows):6}{statistics.mean(errors):9.2f}{errors[int(0.9 * (len(errors) - 1))]:7.2f}"
            f"{errors[-1]:7.2f}{beyond[0]:5}{beyond[1]:5}{beyond[2]:5}{misses:8}{width:7.1f}"
        )
    return lines


def write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")
