"""List the tests that start their processes without coverage.py: docs/decisions/0021-how-the-tests-run.md.

Those with the marker `unmeasured`, and those on Slurm, but for the files in ON_SLURM: a measured process takes more
time, and the many processes of a job take it from each other. A Python is measured where it finds coverage.py's
variable, so such a test runs without it, the fixtures that are made for it too. What it does in pytest's own process is
measured all the same.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

VARIABLE = "COVERAGE_PROCESS_CONFIG"
# Their jobs run code that only a job runs: steps of the batch script, ranks under srun, each end of a job.
ON_SLURM = ("tests/test_main_job.py",)


def measured(item: pytest.Item) -> bool:
    if item.get_closest_marker("unmeasured"):
        return False
    on_slurm = item.get_closest_marker("slurm") or "slurm" in getattr(item, "fixturenames", ())
    return not on_slurm or item.nodeid.partition("::")[0] in ON_SLURM


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    taken = None if measured(item) else os.environ.pop(VARIABLE, None)
    try:
        return (yield)
    finally:
        if taken is not None:
            os.environ[VARIABLE] = taken


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a mark without a reason."""
    for item in items:
        mark = item.get_closest_marker("unmeasured")
        if mark and not mark.args:
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.unmeasured has no reason, expected one: unmeasured('why')"
            )
