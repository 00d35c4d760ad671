"""Writes the stacks of all ranks if no rank prints anything for a long time, for programs that report no steps.

Rank 0 checks the logs of all ranks. If none has changed for a long time, it writes its stacks and a marker file. The
other ranks see this file and write their stacks, too. A rank that reports steps writes a marker file when it detects a
hang, and the others also write their stacks.

The stacks are evidence for `hpcinit why`. Missing output never ends a rank. hpcinit prints nothing about it, because
that would change the logs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path

from hpcinit.base import background_writer, safe_files
from hpcinit.records import hang_report, run_folder, scratch
from hpcinit.runtime.lifecycle import flight_dump, loader_workers
from hpcinit.runtime.process_state import state
from hpcinit.world import World

PERIOD_S = 30.0
PERIODS = 8  # number of checks of the logs before silence counts
LOOKS_FOR_A_STACK = 2  # a rank that has not written its stack after this many checks cannot do so


def period(after_s: float) -> float:
    """Return how many seconds a watch waits between two checks.

    after_s: after how many seconds without output the stacks are written.
    """
    return min(PERIOD_S, after_s / PERIODS)


def write_stacks(path: Path, host: str = "", note: str = "") -> None:
    """Write the stacks of all threads of this process in the form that hang_report.place() reads.

    Write a temporary file and rename it, because this thread may have to wait for the GIL between two writes. Raise
    OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    with new.open("w") as file:
        print(hang_report.MAIN.format(ident=threading.main_thread().ident), file=file)
        loader = loader_workers.awaited()
        print(f"on {host or os.uname().nodename} pid {os.getpid()}{f' loader {loader}' if loader else ''}", file=file)
        print(note, file=file, flush=True)
        faulthandler.dump_traceback(file=file, all_threads=True)
    new.replace(path)


class OutputWatch:
    """A thread of one rank that checks for silence until stop() is called.

    after_s: how many seconds all ranks must be silent before the stacks are written.
    """

    def __init__(self, world: World, after_s: float, folder: Path) -> None:
        self._world, self._folder = world, folder
        self._rank, self._after_s, self._logs = world.rank, after_s, folder / run_folder.LOGS
        self._errors = folder / run_folder.ERRORS
        self._hang = folder / run_folder.HANG_REPORTS / scratch.folder_name(world.job)
        self._marker = self._hang / hang_report.SILENT
        self._no_steps = self._hang / hang_report.NO_STEPS
        self._stack = self._hang / hang_report.STACK.format(rank=world.rank)
        self._period = period(after_s)
        self._newest = 0.0  # time of the last change of any log, by the clock of the file system
        self._printed = self._same_since = time.monotonic()
        self._place: tuple[object, ...] = ()  # the main thread's place at the last check, see _main_place()
        self._cpu = (time.monotonic(), time.process_time())
        self._silent = self._spoke = False
        self._failed = False  # set by stop(): the stacks show what a rank did before the failure
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="hpcinit-output-watch", daemon=True).start()

    def stop(self, failed: bool = False) -> None:
        self._failed = failed
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            with background_writer.suppressed("the stacks of a silent rank"):
                self._look()
        if self._silent and not self._failed:
            self._remove()

    def _look(self) -> None:
        now, cpu = time.monotonic(), time.process_time()
        note = f"cpu_s {cpu - self._cpu[1]:.2f} of_s {now - self._cpu[0]:.2f}"
        if now - self._cpu[0] > 2 * self._period:  # the process was stopped (SIGSTOP, scontrol suspend)
            self._printed += now - self._cpu[0]
        self._cpu = (now, cpu)
        place = _main_place()
        if place != self._place:
            self._place, self._same_since = place, now
        if self._is_silent(now):
            first, self._silent, self._spoke = not self._silent, True, False
            write_stacks(self._stack, self._world.host, f"{note} same_s {now - self._same_since:.0f}")
            if first:
                flight_dump.write(self._world, self._folder)
        elif self._silent and not self._spoke:
            self._spoke = True  # keep the stacks for now: the output may be the traceback of a timed-out collective
        elif self._silent and not any(self._errors.glob("rank-*.json")):
            self._silent = False
            self._remove()

    def _is_silent(self, now: float) -> bool:
        if self._no_steps.exists():  # ranks that report steps hang: they may wait for this rank, which reports none
            return True
        if self._rank:
            return self._marker.exists()
        newest = _newest_change(self._logs, self._newest)
        if newest != self._newest:
            self._newest, self._printed = newest, now
        if now - self._printed < self._after_s:
            return False
        self._hang.mkdir(parents=True, exist_ok=True)
        silent_s = now - self._printed
        complete = silent_s > self._after_s + LOOKS_FOR_A_STACK * self._period
        safe_files.write_atomically(self._marker, json.dumps({"silent_s": round(silent_s), "complete": complete}))
        return True

    def _remove(self) -> None:
        """Remove what this rank wrote, because there is output again or the rank reports steps."""
        for path in (self._stack, *([] if self._rank else [self._marker])):
            path.unlink(missing_ok=True)
        flight_dump.remove(self._world, self._folder)


def _newest_change(logs: Path, known: float) -> float:
    """Return when a log last changed, in seconds since 1970.

    If rank 0's log has changed since `known`, return its time without a check of the other logs, to save time.
    """
    with contextlib.suppress(OSError):
        own = (logs / "rank-0.log").stat().st_mtime
        if own > known:
            return own
    times = []
    for entry in os.scandir(logs):
        with contextlib.suppress(OSError):
            times.append(entry.stat().st_mtime)
    return max(times, default=0.0)


def main_frames() -> tuple[tuple[str, str, int], ...]:
    """Return the file, function and line of each frame of the main thread, innermost frame first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _main_place() -> tuple[object, ...]:
    """Return a value that identifies what the main thread is doing now.

    The value stays the same in a loop over several lines of one function, and changes with each collective.
    """
    inner, *callers = [one for one in main_frames() if not hang_report.STANDARD_LIBRARY.search(one[0])] or [("", "", 0)]
    # The innermost function counts as a whole. The lines of its callers show whether the program continues.
    return (inner[:2], *callers, flight_dump.collectives())


def start(world: World, after_s: float, folder: Path) -> None:
    """Start an OutputWatch for this rank. Never raise, because the program can run without it."""
    stop()
    with contextlib.suppress(RuntimeError):  # this user may have no more threads
        state.output_watch = OutputWatch(world, after_s, folder)


def stop(failed: bool = False) -> None:
    """Stop this rank's OutputWatch, because the program has ended, or because it now reports its steps.

    failed: whether the program failed. If so, the stacks are kept.
    """
    if state.output_watch is not None:
        state.output_watch.stop(failed)
