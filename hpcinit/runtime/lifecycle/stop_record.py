"""Maintains `stopped.json`. If this file exists when a job ends, the run is not finished, and a chain continues it.

Rank 0 writes the file at the first `run.should_stop()`, and adds the reason when the ranks agree to stop. If the
program ends without stopping early, rank 0 removes the file. If the reason cannot be added (full disk), the file
remains without it. Reasons for this design: docs/decisions/0030-stopped-until-finished.md.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.base.console import say
from hpcinit.records import run_folder
from hpcinit.records.stop_reasons import NOT_RECORDED, Reason
from hpcinit.runtime.process_state import state


class StopRecord:
    """The file `stopped.json` of one attempt.

    job: Slurm's job id, or '' without Slurm.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._path, self._job, self._pid = folder / run_folder.STOPPED, job, os.getpid()
        self._exists = False
        try:
            self._write(NOT_RECORDED)
        except OSError as error:
            say(
                f"warning: cannot write {self._path}: {error.strerror}. Free some disk space: the next job of a chain "
                "needs this file"
            )
        atexit.register(self._remove)

    def stop(self, reason: Reason) -> None:
        """Record that all ranks agreed to stop for `reason`.

        If the user requested the stop, remove the record instead, so that no later job continues the run.
        """
        if reason is Reason.USER:
            self._remove()
            return
        state.stopped_early = True
        try:
            self._write(reason.token)
        except OSError as error:
            state.stop_not_recorded = not self._exists  # only the exit status then shows it
            instead = (
                f"this rank will exit with status {run_folder.ENDED_EARLY}, so that the next job of a chain continues"
                if state.stop_not_recorded
                else f"{self._path} shows that the run is not finished, but not the reason"
            )
            say(f"error: cannot record that the training stops ({reason}): {error.strerror}; {instead}")

    def _write(self, reason: str) -> None:
        safe_files.write_atomically(self._path, json.dumps({"job": self._job, "reason": reason}) + "\n")
        self._exists = True

    def _remove(self) -> None:
        """Remove the record when the program ends, but not when a forked child exits."""
        if not state.stopped_early and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._path.unlink()
