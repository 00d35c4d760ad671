"""What a check has found: one line of JSON per claim, written at once, so that a crash loses nothing before it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, MEASURED = "passed", "failed", "measured"
NEEDS_GPU = "needs a GPU"  # the claim means nothing on a CPU; its code ran as far as it can there
NOT_SHOWN = "not shown"  # a compiler, a package or time is missing; the detail has the reason
MISSING = "not installed: not shown"
STATUSES = (FAILED, MISSING, NOT_SHOWN, NEEDS_GPU, MEASURED, PASSED)  # the most important first
CPU_LABEL = "CPU RUN, not a GPU result"


@dataclass(frozen=True)
class Finding:
    """One claim of a check. values: numbers and texts behind it, as JSON has them."""

    claim: str
    status: str
    detail: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


class Findings:
    """Where a check writes what it finds. `cpu`: the suite runs on CPUs, so claims about a device stay open."""

    def __init__(self, path: Path, cpu: bool) -> None:
        self.path, self.cpu = path, cpu

    def add(self, claim: str, status: str, detail: str = "", **values: Any) -> None:
        """Append a finding to the file and print it."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(Finding(claim, status, detail, values)), default=str) + "\n")
        shown = " ".join(detail.split())[:200] if status in {FAILED, MISSING, NOT_SHOWN, MEASURED} else ""
        print(f"  {status}: {claim}{f': {shown}' * bool(shown)}", flush=True)

    def claim(self, claim: str, holds: bool, detail: str = "", *, device: bool = False, **values: Any) -> bool:
        """Record whether a claim holds. device: on a CPU it means nothing, and `holds` is not looked at."""
        open_claim = device and self.cpu
        self.add(claim, NEEDS_GPU if open_claim else PASSED if holds else FAILED, detail, **values)
        return holds or open_claim

    def measured(self, claim: str, detail: str = "", *, device: bool = False, **values: Any) -> None:
        """Record numbers without a judgement."""
        self.add(claim, NEEDS_GPU if device and self.cpu else MEASURED, detail, **values)


def read(path: Path) -> list[Finding]:
    """The findings in `path`; a last line that was cut off is skipped."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Finding(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found
