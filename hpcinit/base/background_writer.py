"""Writes that only report: none of them ends a training run, and none delays its steps.

A full disk, a used-up quota or a file server that does not answer costs the report, with one warning. Reports that are
written while the program trains go through a thread: of several texts for one report it writes the latest.
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

# Errors of a disk, a quota or a file server, and not of a wrong path.
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
RETRY_S = 5.0  # between two attempts at a report that failed
FLUSH_S = 10.0  # how long a process waits for its last reports before it ends

_failing: set[str] = set()
_warned: set[str] = set()


@contextlib.contextmanager
def suppressed(what: str) -> Iterator[None]:
    """Suppress an OSError of the block that writes the report `what`, and print one warning per report and process."""
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
            say(f"{what} is written again")


class _Writer:
    """A daemon thread, which starts with the first report. Its attributes are guarded by `_changed`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, Callable[[], object]] = {}
        self._failed_at: dict[str, float] = {}
        self._busy = ""
        self._stuck = ""  # what a flush has waited for in vain
        self._started = False

    def put(self, what: str, write: Callable[[], object], keep_first: bool) -> None:
        with self._changed:
            if keep_first and what in self._waiting:
                return
            self._waiting[what] = write
            if not self._started:
                try:
                    threading.Thread(target=self._run, name="hpcinit-reports", daemon=True).start()
                except RuntimeError:  # this user may have no more threads: the next report tries again
                    return
                self._started = True
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        with self._changed:
            if not self._started or (self._stuck and self._busy == self._stuck):
                return not self._waiting and not self._busy
            self._failed_at.clear()  # try again now
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._busy and self._due() is None, timeout_s):
                self._stuck = self._busy
                say(f"warning: {self._busy} was not written within {timeout_s:g} s: its file system does not answer")
            return not self._waiting and not self._busy

    def _due(self) -> str | None:
        """The first report that is to be written now."""
        now = time.monotonic()
        return next((what for what in self._waiting if now >= self._failed_at.get(what, -RETRY_S) + RETRY_S), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (what := self._due()) is None:
                    self._changed.wait(RETRY_S if self._waiting else None)
                write, self._busy = self._waiting.pop(what), what
            try:
                with suppressed(what):
                    write()
            except Exception as error:  # the thread goes on: other reports wait
                say(f"warning: {what} cannot be written: {error!r}")
            with self._changed:
                if what in _failing:
                    self._failed_at[what] = time.monotonic()
                    self._waiting.setdefault(what, write)
                else:
                    self._failed_at.pop(what, None)
                self._busy = ""
                self._changed.notify_all()


_writer = _Writer()


def later(what: str, write: Callable[[], object], *, keep_first: bool = False) -> None:
    """Have the thread call `write`, which may raise OSError, until it succeeds; return at once.

    It takes the place of a `write` for the same report that still waits; with keep_first, that one stays.
    """
    _writer.put(what, write, keep_first)


def flush(timeout_s: float = FLUSH_S) -> bool:
    """Try all reports that wait once more; return whether all are written after at most `timeout_s` seconds."""
    return _writer.flush(timeout_s)


def _in_child() -> None:
    """A forked child has no copy of the thread, and its parent writes what waits."""
    global _writer  # noqa: PLW0603 - a process has one
    _writer = _Writer()


os.register_at_fork(after_in_child=_in_child)
atexit.register(flush)
