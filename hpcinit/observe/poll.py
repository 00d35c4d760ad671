"""Asking for a run's state again and again, without becoming a burden for the controller."""

from __future__ import annotations

import time
from pathlib import Path

from hpcinit.observe import state

QUICK_S, SLOW_S = 1.0, 10.0  # between two questions to the controller
PATIENCE = 5  # the longer nothing has happened the rarer: after n seconds every n/5
FORGOTTEN_S = 60.0  # after which a job that Slurm knows nothing of will not come back


class Poll:
    """`now`: the last answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._happened = self._asked = self._known = time.monotonic()
        self.now = state.read(path)
        self._status = state.exit_status(path)

    def ask(self) -> bool:
        """Ask if it is time to, soon after the batch script has left its last word. True: the run is over."""
        clock = time.monotonic()
        status = state.exit_status(self._path)
        if status != self._status:
            self._happened, self._status = clock, status
        pause = min(SLOW_S, max(QUICK_S, (clock - self._happened) / PATIENCE))
        if not self.now.over and (self.now.engine == "local" or clock - self._asked >= pause):
            before, self.now, self._asked = self.now, state.read(self._path), clock
            if self.now.name != before.name:
                self._happened = clock
        if not self.now.forgotten:
            self._known = clock
        return self.now.over or clock - self._known > FORGOTTEN_S
