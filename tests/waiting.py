"""Waiting in tests for what comes in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], timeout_s: float = 150, pause_s: float = 0.3) -> None:
    """Asks again and again. AssertionError after timeout_s, of which be generous: the machine may be loaded."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"not within {timeout_s:g} s"
        time.sleep(pause_s)
