"""Tests with the marker `unmeasured` start their processes without coverage.py: docs/decisions/0028-coverage.md.

It measures a Python that finds its variable, so each such test runs without it, fixtures included. What the test itself
does in pytest's own process is measured all the same.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

VARIABLE = "COVERAGE_PROCESS_CONFIG"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    taken = os.environ.pop(VARIABLE, None) if item.get_closest_marker("unmeasured") else None
    try:
        return (yield)
    finally:
        if taken is not None:
            os.environ[VARIABLE] = taken


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A mark without its reason is refused: what is not measured is said, and why."""
    for item in items:
        mark = item.get_closest_marker("unmeasured")
        if mark and not mark.args:
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.unmeasured has no reason, expected one: unmeasured('why')"
            )
