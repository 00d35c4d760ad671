"""`stopped.txt`: exists while a training that can stop early runs, and stays behind if it stops before its end.

Rank 0 writes it at the first `run.should_stop()`, replaces it when the ranks agree to stop, and removes it at the end
of a program that did not stop. If the ranks stop and the file cannot be replaced, because the disk is full for example,
the first file still exists, and the next job of a chain runs. Why: docs/decisions/0030-stopped-until-proven-done.md.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from pathlib import Path

from hpcinit.facts import plain_files, runfolder
from hpcinit.facts.saying import say
from hpcinit.facts.stopping import NOT_RECORDED, Reason
from hpcinit.runtime.process_state import state


class StopRecord:
    """The record of one attempt. job: Slurm's id, '' without Slurm."""

    def __init__(self, folder: Path, job: str) -> None:
        self._path, self._job, self._pid = folder / runfolder.STOPPED, job, os.getpid()
        self._exists = False
        try:
            self._write(NOT_RECORDED)
        except OSError as error:
            say(f"warning: cannot write {self._path}: {error.strerror}; free some space before this training stops")
        atexit.register(self._remove)

    def stop(self, reason: Reason) -> None:
        """All ranks agreed to stop for `reason`. A program that the user asked to stop is done."""
        if reason is Reason.USER:
            self._remove()
            return
        state.stopped_early = True
        try:
            self._write(reason.token)
        except OSError as error:
            state.stop_not_recorded = not self._exists  # the exit status must say so then
            instead = (
                f"this rank exits with status {runfolder.ENDED_EARLY} instead of 0: the next job of a chain runs"
                if state.stop_not_recorded
                else f"{self._path} still says that the training did not finish, without the reason"
            )
            say(f"error: cannot record that the training stops ({reason}): {error.strerror}; {instead}")

    def _write(self, reason: str) -> None:
        plain_files.write(self._path, {"job": self._job, "reason": reason})
        self._exists = True

    def _remove(self) -> None:
        """At the program's end. A forked child that exits is not the program."""
        if not state.stopped_early and os.getpid() == self._pid:
            with suppress(OSError):
                self._path.unlink()
