"""Writes reports in the background, so that a failed write can neither end nor delay the training run.

If a disk is full, a quota is exceeded or a file server does not answer, only the report is lost. hpcinit prints one
warning. During training, a thread writes the reports. If several versions of a report wait, it writes the latest.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator

from hpcinit.base.console import say

# Errors of a disk, a quota or a file server, as opposed to a wrong path.
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
RETRY_S = 5.0  # between two attempts at a report that failed
FLUSH_S = 10.0  # how long a process waits for its last reports before it ends

_failing: set[str] = set()
_warned: set[str] = set()


@contextlib.contextmanager
def suppressed(what: str) -> Iterator[None]:
    """Turn an OSError in the `with` block into a warning.

    what: the name of the report that the block writes. There is one warning per report and process.
    """
    try:
        yield
    except OSError as error:
        _failing.add(what)
        if what not in _warned:
            _warned.add(what)
            say(f"warning: {what} cannot be written: {error}; the program continues, and hpcinit tries again")
    else:
        if what in _failing:
            _failing.discard(what)
            say(f"{what} can be written again")


class _Writer:
    """A daemon thread that writes reports. The first report starts it. The lock `_changed` protects all attributes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, Callable[[], object]] = {}
        self._not_before: dict[str, float] = {}  # by report: the time.monotonic() of the next attempt
        self._every_s: dict[str, float] = {}
        self._busy = ""
        self._stuck = ""  # the report for which a flush timed out
        self._started = False

    def put(self, what: str, write: Callable[[], object], keep_first: bool, every_s: float) -> None:
        """Queue a report; see later()."""
        with self._changed:
            if keep_first and what in self._waiting:
                return
            new = what not in self._waiting  # a new report may be due before the thread's pause ends
            self._waiting[what] = write
            self._every_s[what] = every_s
            if not every_s and what not in _failing:
                self._not_before.pop(what, None)
            if not self._started:
                try:
                    threading.Thread(target=self._run, name="hpcinit-reports", daemon=True).start()
                except RuntimeError:  # the user's limit of threads is reached; the next report tries again
                    return
                self._started = True
            if new or self._due() is not None:
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        with self._changed:
            if not self._started or (self._stuck and self._busy == self._stuck):
                return not self._waiting and not self._busy
            self._not_before.clear()  # try again now
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._busy and self._due() is None, timeout_s):
                self._stuck = self._busy
                say(f"warning: {self._busy} was not written within {timeout_s:g} s: its file system does not answer")
            return not self._waiting and not self._busy

    def _due(self) -> str | None:
        now = time.monotonic()
        return next((what for what in self._waiting if now >= self._not_before.get(what, now)), None)

    def _pause_s(self) -> float | None:
        """Return the seconds until the next report is due, or None if no report is waiting."""
        times = [self._not_before.get(what, 0.0) for what in self._waiting]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _run(self) -> None:
        """Write each report when it is due, until the process ends."""
        while True:
            with self._changed:
                while (what := self._due()) is None:
                    self._changed.wait(self._pause_s())
                write, self._busy = self._waiting.pop(what), what
            try:
                with suppressed(what):
                    write()
            except Exception as error:  # the thread must continue, because other reports wait
                say(f"warning: {what} cannot be written: {error!r}")
            with self._changed:
                if what in _failing:
                    self._not_before[what] = time.monotonic() + RETRY_S
                    self._waiting.setdefault(what, write)
                elif self._every_s[what]:
                    self._not_before[what] = time.monotonic() + self._every_s[what]
                else:
                    self._not_before.pop(what, None)
                self._busy = ""
                self._changed.notify_all()


_writer = _Writer()


def later(what: str, write: Callable[[], object], *, keep_first: bool = False, every_s: float = 0.0) -> None:
    """Queue a report and return at once. A thread writes it.

    what: the report's name. A new report replaces a waiting one of the same name.
    write: a function that writes the report. It is called again after an OSError.
    keep_first: if a report of this name is waiting, ignore the new one.
    every_s: the shortest time between two writes of this report. The latest version is always written.
    """
    _writer.put(what, write, keep_first, every_s)


def flush(timeout_s: float = FLUSH_S) -> bool:
    """Write all pending reports now. Return whether all of them were written within `timeout_s` seconds."""
    return _writer.flush(timeout_s)


def _in_child() -> None:
    """Give a forked child a new writer, because fork() does not copy threads. The parent writes the queued reports."""
    global _writer  # noqa: PLW0603 - a process has one
    _writer = _Writer()


os.register_at_fork(after_in_child=_in_child)
atexit.register(flush)
