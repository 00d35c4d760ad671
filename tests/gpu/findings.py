"""The findings of a check: one line of JSON per claim, written at once, so that a crash loses no earlier finding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, MEASURED = "passed", "failed", "measured"
NEEDS_GPU = "needs a GPU"  # the claim has no meaning on a CPU; its code ran as far as possible
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
    """The file in which a check writes its findings. `cpu`: the suite runs on CPUs, so claims about a device stay open."""

    def __init__(self, path: Path, cpu: bool) -> None:
        self.path, self.cpu = path, cpu

    def add(self, claim: str, status: str, detail: str = "", **values: Any) -> None:
        """Append a finding to the file and print it."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(Finding(claim, status, detail, values)), default=str) + "\n")
        shown = " ".join(detail.split())[:200] if status in {FAILED, MISSING, NOT_SHOWN, MEASURED} else ""
        print(f"  {status}: {claim}{f': {shown}' * bool(shown)}", flush=True)

    def claim(self, claim: str, holds: bool, detail: str = "", *, device: bool = False, **values: Any) -> bool:
        """Record whether a claim holds. device: on a CPU it has no meaning, and `holds` is not used."""
        open_claim = device and self.cpu
        self.add(claim, NEEDS_GPU if open_claim else PASSED if holds else FAILED, detail, **values)
        return holds or open_claim

    def measured(self, claim: str, detail: str = "", *, device: bool = False, **values: Any) -> None:
        """Record numbers without a verdict."""
        self.add(claim, NEEDS_GPU if device and self.cpu else MEASURED, detail, **values)


def read(path: Path) -> list[Finding]:
    """Return the findings in `path`, without a truncated last line."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Finding(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found
