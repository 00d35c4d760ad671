"""Signals to an agent: passed on to its ranks, and to those only that have not had them already.

slurmstepd signals every process of a step (Slurm 22.05: those in other sessions too), so what comes from it has reached
the ranks. hpcinit's local engine signals a task's own process group, and a person one process. Who sent a signal is
told to sigwaitinfo(2) and not to a handler: hence blocked signals and a thread that waits for them.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from hpcinit.base import signals

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
# CONT is left out: Slurm sends it before every other signal, and by itself it ends nothing.
HANDLED = ENDING | {signal.SIGUSR1, signal.SIGUSR2}
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
        signals.block(HANDLED)
        # For the moments in which unblocked() lets them in.
        signals.Handlers(HANDLED, lambda number, frame: self._came.put(Came(signal.Signals(number), True)))
        signals.Listener(HANDLED, self._heard)

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
        with signals.unblocked(HANDLED):
            return start()

    def _heard(self, number: signal.Signals, sender: int) -> None:
        if self._waited_for:
            self._came.put(Came(number, not self._of_step or sender != self._of_step))
        elif number in ENDING:
            signals.end_by(number)
