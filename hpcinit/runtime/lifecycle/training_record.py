"""Records on rank 0 what the program is doing (building the model, loading, training, ...) for `hpcinit report`.

Recording a step takes a few microseconds. A thread writes the file, so a slow or full disk does not affect training. It
writes at most once per second, and less often in long runs. If rank 0 is killed, the newest records are missing.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path

from hpcinit.base import background_writer, safe_files
from hpcinit.records import training_spans
from hpcinit.records.training_spans import SpanRecord
from hpcinit.runtime import startup
from hpcinit.runtime.process_state import state

LEAST_S, SHARE = 1.0, 1e-3  # the time between two writes: in seconds, and as a share of the elapsed time


class TrainingRecord:
    """Records what this process does.

    folder: the timeline folder of this attempt.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._pid = folder / training_spans.FILE, os.getpid()
        self._record = SpanRecord(startup.now())
        self._began = time.monotonic()
        self._waits = False  # whether a write is pending
        self._write()
        atexit.register(self._close)

    def step(self, step: int) -> None:
        """Record that a training step is finished.

        step: its number, or -1 if the program gives none.
        """
        self._record.step(step, startup.now())
        if not self._waits:
            self._write()

    def loaded(self, step: int) -> None:
        """Record the step of the checkpoint that was loaded."""
        self._record.loaded(step)

    def switch(self, what: str) -> str:
        """Record that the rank now does `what`. Return what it did before."""
        before = self._record.what
        if threading.current_thread() is threading.main_thread():  # other threads do not interrupt the training steps
            self._record.switch(what, startup.now())
            self._write()
        return before

    def built(self) -> None:
        """Record that the model has been built, and that the first step starts."""
        if self._record.what == training_spans.BUILD:
            self.switch(training_spans.FIRST)

    def _write(self) -> None:
        self._waits = True
        every_s = max(LEAST_S, SHARE * (time.monotonic() - self._began))
        background_writer.later(training_spans.FILE, self._write_file, every_s=every_s)

    def _write_file(self) -> None:
        """Write what has been recorded until now. A thread calls this, even if the ranks hang."""
        self._waits = False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        safe_files.write_atomically(self._path, self._record.to_json())

    def _close(self) -> None:
        """At exit, queue the unwritten records. background_writer's exit handler runs later and writes them."""
        if os.getpid() == self._pid:
            self._write()


def begin(timeline: Path | None, rank: int) -> None:
    """Start recording what this process does, if it is rank 0 and does not record already.

    timeline: the timeline file of this process, or None without a run folder.
    """
    if timeline is not None and rank == 0 and state.training_record is None:
        state.training_record = TrainingRecord(timeline.parent)
