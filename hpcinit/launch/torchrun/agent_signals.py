"""Receives the agent's signals, and forwards those that the ranks have not received.

slurmstepd signals every process of a step, including the ranks. But hpcinit's local engine or a user may signal only
the agent, which must then forward the signal. To see who sent a signal, a thread waits for it with sigwaitinfo(2), and
signals are blocked in all threads.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from hpcinit.base import signals

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
# SIGCONT is not handled: Slurm sends it before every other signal, and it ends no process.
HANDLED = ENDING | {signal.SIGUSR1, signal.SIGUSR2}
T = TypeVar("T")


class ReceivedSignal(NamedTuple):
    """A signal that the agent has received.

    forward: whether to forward the signal, because the ranks have not received it.
    """

    number: signal.Signals
    forward: bool


class Signals:
    """Collects signals while ranks run. take() returns them.

    While no rank is running, SIGTERM and similar signals end this process as usual. Create the object in the main
    thread, before other threads start.
    """

    def __init__(self, under_slurm: bool | None = None) -> None:
        # True only if slurmstepd itself created this process, because child processes inherit SLURM_TASK_PID.
        is_task = os.environ.get("SLURM_TASK_PID") == str(os.getpid())
        self._step_daemon = os.getppid() if (is_task if under_slurm is None else under_slurm) else 0
        self._received: queue.SimpleQueue[ReceivedSignal] = queue.SimpleQueue()
        self._collecting = False
        signals.block(HANDLED)
        # These handlers run for signals that arrive in unblocked().
        signals.Handlers(
            HANDLED, lambda number, frame: self._received.put(ReceivedSignal(signal.Signals(number), True))
        )
        signals.Listener(HANDLED, self._on_signal)

    def collect(self) -> None:
        """Start to collect signals. Call this while ranks run, because signals may have to be forwarded to them."""
        self._collecting = True

    def stop_collecting(self) -> None:
        """Stop collecting signals. Call this when no rank is running any more."""
        self._collecting = False

    def take(self) -> Iterator[ReceivedSignal]:
        """Yield the signals that have arrived since the last call."""
        while not self._received.empty():
            yield self._received.get()

    def unblocked(self, start: Callable[[], T]) -> T:
        """Call `start` with signals unblocked, and return its result.

        `start` starts a process, which would inherit blocked signals.
        """
        with signals.unblocked(HANDLED):
            return start()

    def _on_signal(self, number: signal.Signals, sender: int) -> None:
        """Store a signal for take(). If no rank is running, a signal in ENDING ends this process."""
        if self._collecting:
            self._received.put(ReceivedSignal(number, not self._step_daemon or sender != self._step_daemon))
        elif number in ENDING:
            signals.end_by(number)
