"""Asking for a run's state again and again, without becoming a burden for the controller."""

from __future__ import annotations

import time
from pathlib import Path

from hpcinit.observe import state

QUICK_S, SLOW_S = 1.0, 10.0  # between two questions to the controller; slower after the first minute
FIRST_S = 60.0
FORGOTTEN_S = 60.0  # after which a job that Slurm knows nothing of will not come back


class Poll:
    """`now`: the last answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = self._asked = self._known = time.monotonic()
        self.now = state.read(path)

    def ask(self) -> bool:
        """Ask if it is time to, sooner once the batch script has left its last word. True: the run is over."""
        clock = time.monotonic()
        soon = clock - self._began < FIRST_S or state.exit_status(self._path) is not None
        if not self.now.over and (self.now.engine == "local" or clock - self._asked > (QUICK_S if soon else SLOW_S)):
            self.now, self._asked = state.read(self._path), clock
        if not self.now.forgotten:
            self._known = clock
        return self.now.over or clock - self._known > FORGOTTEN_S
