"""Run a failed test on real daemons or several processes again if CI=true, and report that clearly.

docs/decisions/0021-tests-rerun-in-ci.md. It applies to tests with the marker `slurm` or `chaos`, with the fixture `slurm` or
in PROCESSES, and to at most AT_MOST tests of a session, because more failures are not chance.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

MARKERS = ("slurm", "chaos")
PROCESSES = ("tests/local/", "tests/runtime/", "tests/systems/", "tests/third_party/")  # ranks that wait for each other
AT_MOST = 5  # second tries of a session, all of its workers together


def pytest_configure(config: pytest.Config) -> None:
    if not asked():
        return
    if not config.pluginmanager.hasplugin("rerunfailures"):
        raise pytest.UsageError("CI=true needs pytest-rerunfailures, for second tries: pip install '.[test]'")
    config.option.max_suite_reruns = AT_MOST


def asked() -> bool:
    return os.environ.get("CI") == "true"


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items if asked() else ():
        marked = any(map(item.get_closest_marker, MARKERS))
        if marked or "slurm" in getattr(item, "fixturenames", ()) or item.nodeid.startswith(PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    first_tries = terminalreporter.stats.get("rerun", [])
    if not first_tries:
        return
    ends = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    failed = {report.nodeid for report in ends}
    terminalreporter.section("SECOND TRIES", sep="!", yellow=True, bold=True)
    for report in first_tries:
        end = "failed again" if report.nodeid in failed else "passed the second time"
        terminalreporter.line(f"{report.nodeid} failed in its {report.when}, and {end}. The first time:", yellow=True)
        terminalreporter.line(f"  {why(report)}")
    count = f"{len(first_tries)} tests needed" if len(first_tries) > 1 else "1 test needed"
    terminalreporter.line(f"{count} a second try: each is a defect, of the test or of what it tests.", yellow=True)


def why(report: pytest.TestReport) -> str:
    """Return where the test failed and its error; the whole report if pytest has no such place."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
