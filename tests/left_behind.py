"""A pytest plugin that adds the logs of a failed test's runs to its report: in CI the folders are not available."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

LINES, RUNS, RANKS = 30, 4, 4  # limits: lines per log, the newest runs, the first ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and call.when == "call" and isinstance(folder, Path):
        report.sections.extend((f"end of {log.relative_to(folder)}", tail(log)) for log in logs(folder))
    return report


def logs(folder: Path) -> list[Path]:
    """Return the logs of the run folders in folder/runs, the newest last."""
    runs = sorted((path.parent for path in folder.glob("runs/*/logs")), key=lambda run: run.stat().st_mtime)
    names = ["job.log", *(f"rank-{rank}.log" for rank in range(RANKS))]
    return [log for run in runs[-RUNS:] for name in names if (log := run / "logs" / name).is_file()]


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])
