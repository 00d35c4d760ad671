"""Wait for a condition in tests."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], timeout_s: float = 150, pause_s: float = 0.3) -> None:
    """Poll the condition. Raise AssertionError after timeout_s, which should be long: the machine may be busy."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"not within {timeout_s:g} s"
        time.sleep(pause_s)
