"""`make chaos` runs all tests and writes the table; `make test-all` runs only the short form."""

from __future__ import annotations

import os

import pytest

ALL = "HPCINIT_CHAOS"  # environment variable: 1 runs all tests and writes the table in docs/


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are not in the short form."""
    if os.environ.get(ALL) == "1":
        return
    out = [item for item in items if (mark := item.get_closest_marker("chaos")) and not _short(item, mark)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def _short(item: pytest.Item, mark: pytest.Mark) -> bool:
    """Whether the test is in the short form: short=True, or short=LAUNCH for a test with this launch."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return mark.kwargs.get("short", False) in (True, parameters.get("launch", True))
