"""A table in shared memory in which the ranks of a node report their progress to the fork server that started them.

Even after kill -9, the table contains the rank's last step. A file that a rank writes once per second could miss it.
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
    """One rank's part of a table in shared memory. The rank writes it, and the fork server reads it."""

    def __init__(self, cells: Any) -> None:
        """Use `cells` as this rank's part of the table. Set the steps in it to -1, which means 'none so far'.

        cells: a memoryview of doubles, one for each of NAMES.
        """
        self._cells = cells
        for name in STEPS:
            self.report(name, -1)

    def report(self, name: str, value: float | None = None) -> None:
        """Write one of the values in NAMES.

        value: a step, or None to write the current time. If the time was written before, it is not changed.
        """
        place = NAMES.index(name)
        if value is not None:
            self._cells[place] = float(value)
        elif not self._cells[place]:
            self._cells[place] = time.time()

    def __getitem__(self, name: str) -> float:
        return float(self._cells[NAMES.index(name)])


def slots(ranks: int) -> list[Slot]:
    """Return a new slot for each rank of a node. Call this before the ranks are forked, each time they are started."""
    table = memoryview(mmap.mmap(-1, ranks * len(NAMES) * 8)).cast("d")
    return [Slot(table[at * len(NAMES) : (at + 1) * len(NAMES)]) for at in range(ranks)]
