"""The report: report.md for people and report.json with everything, both rewritten after every check."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.checks import Check
from tests.gpu.findings import CPU_LABEL, FAILED, MEASURED, MISSING, NOT_SHOWN, PASSED, STATUSES, Finding


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check. ended: why its process failed, or ''."""

    check: Check
    findings: Sequence[Finding]
    seconds: float
    ended: str = ""

    @property
    def status(self) -> str:
        """The most important status of its findings."""
        if self.ended:
            return FAILED
        there = {finding.status for finding in self.findings}
        worst = next((status for status in STATUSES if status in there), NOT_SHOWN)
        return PASSED if worst == MEASURED else worst


def write(out: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome], cpu: bool) -> None:
    """Write report.md and report.json into the folder `out`."""
    (out / "report.md").write_text(markdown(machine, outcomes, cpu))
    document = {
        "run": CPU_LABEL if cpu else "GPU",
        "machine": machine,
        "checks": [
            {"name": one.check.name, "about": one.check.about, "status": shown(one.status, cpu), "ended": one.ended,
             "seconds": round(one.seconds, 1), "findings": [asdict(finding) for finding in one.findings]}
            for one in outcomes
        ],
    }  # fmt: skip
    (out / "report.json").write_text(json.dumps(document, indent=1, default=str) + "\n")


def shown(status: str, cpu: bool) -> str:
    """Return the status, with the label if it is a CPU run."""
    return f"{status} ({CPU_LABEL})" if cpu else status


def markdown(machine: Mapping[str, Any], outcomes: Sequence[Outcome], cpu: bool) -> str:
    """Return the whole report. In a CPU run every heading and every table row has the label."""
    mark = f" ({CPU_LABEL})" * cpu
    lines = [f"# GPU suite of hpcinit{mark}", ""]
    lines += _table(("machine", "value"), [(name, _text(value)) for name, value in machine.items()], mark)
    lines += [f"## Summary{mark}", ""]
    summary = [
        (one.check.name, shown(one.status, cpu), _counts(one), f"{one.seconds:.0f} s", one.check.about)
        for one in outcomes
    ]
    lines += _table(("check", "result", "claims", "time", "about"), summary)
    open_claims = [
        (f"{one.check.name}: {finding.claim}", shown(finding.status, cpu), finding.detail)
        for one in outcomes
        for finding in one.findings
        if finding.status in {FAILED, MISSING, NOT_SHOWN}
    ]
    if open_claims:
        lines += [f"## Failed or not shown{mark}", "", *_table(("claim", "result", "detail"), open_claims)]
    for one in outcomes:
        lines += [f"## {one.check.name}{mark}", ""]
        rows = [(finding.claim, shown(finding.status, cpu), finding.detail) for finding in one.findings]
        if one.ended:
            rows.append(("the check finishes", shown(FAILED, cpu), one.ended))
        lines += _table(("claim", "result", "detail"), rows)
    return "\n".join(lines)


def _counts(one: Outcome) -> str:
    counted = {status: sum(finding.status == status for finding in one.findings) for status in STATUSES}
    return ", ".join(f"{count} {status}" for status, count in counted.items() if count)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], mark: str = "") -> list[str]:
    """mark: appended to the last cell of each row."""
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in rows:
        cells = [" ".join(str(cell).split()).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)}{mark} |")
    return [*lines, ""]
