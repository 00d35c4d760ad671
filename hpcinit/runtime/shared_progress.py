"""A table in shared memory in which the ranks of a node report their progress to the fork server that started them.

Even if a rank is killed with SIGKILL, the table contains its last step. A file that is written only once per second
could lack this step.
"""

from __future__ import annotations

import mmap
import time
from typing import Any

# Times in seconds since 1970, 0.0 if not reached. up: init() returned. loaded: run.load() returned for the first time.
# stepped: the first run.progress(). Steps, -1 if none. step: the last reported step. saved: the last saved step.
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
    """Return a new slot for each rank of a node. Call this before each fork of the ranks."""
    table = memoryview(mmap.mmap(-1, ranks * len(NAMES) * 8)).cast("d")
    return [Slot(table[at * len(NAMES) : (at + 1) * len(NAMES)]) for at in range(ranks)]
