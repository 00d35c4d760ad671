"""Signals to an agent: passed on to its ranks, and to those only that have not had them already.

slurmstepd signals every process of a step (Slurm 22.05: those in other sessions too), so what comes from it has reached
the ranks. hpcinit's local engine signals a task's own process group, and a person one process. Who sent a signal is
told to sigwaitinfo(2) and not to a handler: hence blocked signals and a thread that waits for them.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
# CONT is left out: Slurm sends it before every other signal, and by itself it ends nothing.
HEEDED = ENDING | {signal.SIGUSR1, signal.SIGUSR2}
T = TypeVar("T")


class Came(NamedTuple):
    """pass_on: the ranks have not had it."""

    number: signal.Signals
    pass_on: bool


class Signals:
    """From now on a signal waits for take(); while nobody takes any, one that asks for the end ends this process.

    Make it in the main thread, before other threads are started.
    """

    def __init__(self, under_slurm: bool | None = None) -> None:
        # slurmstepd has made this very process: SLURM_TASK_PID is inherited by those below, too.
        here = os.environ.get("SLURM_TASK_PID") == str(os.getpid())
        self._of_step = os.getppid() if (here if under_slurm is None else under_slurm) else 0
        self._came: queue.SimpleQueue[Came] = queue.SimpleQueue()
        self._waited_for = False
        signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
        for number in HEEDED:  # for the moments in which unblocked() lets them in
            signal.signal(number, lambda number, frame: self._came.put(Came(signal.Signals(number), True)))
        threading.Thread(target=self._listen, name="hpcinit-signals", daemon=True).start()

    def begin(self) -> None:
        """There are ranks: from now on somebody takes what comes."""
        self._waited_for = True

    def end(self) -> None:
        """There are none any more."""
        self._waited_for = False

    def take(self) -> Iterator[Came]:
        """What has come since the last time."""
        while not self._came.empty():
            yield self._came.get()

    def unblocked(self, start: Callable[[], T]) -> T:
        """start() a process: it inherits what the thread that starts it blocks."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)
        try:
            return start()
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)

    def _listen(self) -> None:
        while True:
            found = signal.sigwaitinfo(HEEDED)
            number = signal.Signals(found.si_signo)
            if self._waited_for:
                self._came.put(Came(number, not self._of_step or found.si_pid != self._of_step))
            elif number in ENDING:
                end_by(number)


def end_by(number: int) -> None:
    """End this process as the signal would have ended it. From any thread."""
    ctypes.CDLL(None).signal(number, 0)  # 0: SIG_DFL; Python's own way is open to the main thread only
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
