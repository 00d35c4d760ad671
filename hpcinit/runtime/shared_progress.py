"""What the ranks of a node report to the fork server that forked them: a table in memory that they share.

A rank that kill -9 ends has written its last step there, which a file that is written once a second would lack.
"""

from __future__ import annotations

import mmap
import time
from typing import Any

# up: init() returned. loaded: the last run.load() returned. stepped: the first run.progress(). Seconds since 1970, 0.0
# before. step: the last one that the rank reported, saved: the last one that run.save() completed; -1 before the first.
TIMES, STEPS = ("up", "loaded", "stepped"), ("step", "saved")
NAMES = (*TIMES, *STEPS)


class Slot:
    """The values of one rank. The rank writes them, the fork server reads them."""

    def __init__(self, cells: Any) -> None:
        """cells: a memoryview of doubles."""
        self._cells = cells
        for name in STEPS:
            self.report(name, -1)

    def report(self, name: str, value: float | None = None) -> None:
        """Write one of NAMES. value: a step; None for the current time, which counts the first time only."""
        place = NAMES.index(name)
        if value is not None:
            self._cells[place] = float(value)
        elif not self._cells[place]:
            self._cells[place] = time.time()

    def __getitem__(self, name: str) -> float:
        return float(self._cells[NAMES.index(name)])


def slots(ranks: int) -> list[Slot]:
    """Return a slot for each rank of a node, for one start of the ranks. Call it before they are forked."""
    table = memoryview(mmap.mmap(-1, ranks * len(NAMES) * 8)).cast("d")
    return [Slot(table[at * len(NAMES) : (at + 1) * len(NAMES)]) for at in range(ranks)]
