"""Queries the states of runs again and again, at intervals that do not overload the controller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hpcinit.observe import overview, state
from hpcinit.records import job_record

QUICK_S, SLOW_S = 1.0, 10.0  # between two queries of the controller
PATIENCE = 5  # after n seconds without a change, the interval is n/5
PURGED_S = 60.0  # stop waiting for a job if Slurm has not listed it for this long
FEW = 20  # for up to this many jobs, the exit records are read, too; for more jobs, only Slurm is queried


class Polls:
    """The latest states of several runs, in the attribute `now`. One query covers all runs.

    first: the state of the first run, which must not be a sweep.

    The constructor raises RequestError if one of the folders is not a run.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._changed = self._queried = self._known = time.monotonic()
        self.now = overview.read(paths, newest=True)
        for run in self.now:
            if run.error:
                raise run.error
        self._exits = self._exit_statuses()

    @property
    def first(self) -> state.State:
        run = self.now[0]
        assert run.now is not None, f"{run.path} is a sweep"
        return run.now

    def ask(self) -> bool:
        """Query Slurm again if enough time has passed. Return whether all runs are over.

        Slurm is also queried soon after a batch script has recorded its end.
        """
        clock = time.monotonic()
        if (exits := self._exit_statuses()) != self._exits:
            self._changed, self._exits = clock, exits
        pause = min(SLOW_S, max(QUICK_S, (clock - self._changed) / PATIENCE))
        of_slurm = any(now.engine.uses_slurm for run in self.now if not run.over for _, now in run.parts)
        if not of_slurm or clock - self._queried >= pause:
            before, self._queried = self._names(), clock
            fresh = {
                run.path: run for run in overview.read([run.path for run in self.now if not run.over], newest=True)
            }
            self.now = [fresh.get(run.path, run) for run in self.now]
            if self._names() != before:
                self._changed = clock
        if not any(now.purged for run in self.now for _, now in run.parts):
            self._known = clock
        return all(run.over for run in self.now) or clock - self._known > PURGED_S

    def _names(self) -> list[tuple[str, str]]:
        return [(now.job_id, now.name) for run in self.now for _, now in run.parts]

    def _exit_statuses(self) -> list[int | None]:
        open_ = [path for run in self.now for path, now in run.parts if not now.over and now.name != "PENDING"]
        return [job_record.exit_status(path) for path in open_] if len(open_) <= FEW else []
