"""Signals to an agent, which it forwards to its ranks unless they have received them already.

slurmstepd signals every process of a step (Slurm 22.05: those in other sessions too), so its signals have reached the
ranks. hpcinit's local engine signals a task's own process group, and a person signals one process. Only sigwaitinfo(2)
reports the sender of a signal, a handler does not: hence the signals are blocked and a thread waits for them.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from hpcinit.base import signals

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
# SIGCONT is not handled: Slurm sends it before every other signal, and alone it ends nothing.
HANDLED = ENDING | {signal.SIGUSR1, signal.SIGUSR2}
T = TypeVar("T")


class Came(NamedTuple):
    """A signal. forward: the ranks have not received it."""

    number: signal.Signals
    forward: bool


class Signals:
    """Collects signals for take(). Outside of collect() and stop_collecting(), a signal that asks to end terminates
    this process.

    Create it in the main thread, before other threads are started.
    """

    def __init__(self, under_slurm: bool | None = None) -> None:
        # slurmstepd has created this process itself: SLURM_TASK_PID is inherited by processes below it, too.
        here = os.environ.get("SLURM_TASK_PID") == str(os.getpid())
        self._of_step = os.getppid() if (here if under_slurm is None else under_slurm) else 0
        self._came: queue.SimpleQueue[Came] = queue.SimpleQueue()
        self._waited_for = False
        signals.block(HANDLED)
        # For the moments in which unblocked() lets signals in.
        signals.Handlers(HANDLED, lambda number, frame: self._came.put(Came(signal.Signals(number), True)))
        signals.Listener(HANDLED, self._heard)

    def collect(self) -> None:
        """Collect signals from now on: there are ranks to forward them to."""
        self._waited_for = True

    def stop_collecting(self) -> None:
        """Stop collecting: there are no ranks any more."""
        self._waited_for = False

    def take(self) -> Iterator[Came]:
        """Yield the signals that have arrived since the last call."""
        while not self._came.empty():
            yield self._came.get()

    def unblocked(self, start: Callable[[], T]) -> T:
        """Call start(), which starts a process, with signals unblocked: it inherits the blocked ones of the thread."""
        with signals.unblocked(HANDLED):
            return start()

    def _heard(self, number: signal.Signals, sender: int) -> None:
        if self._waited_for:
            self._came.put(Came(number, not self._of_step or sender != self._of_step))
        elif number in ENDING:
            signals.end_by(number)
