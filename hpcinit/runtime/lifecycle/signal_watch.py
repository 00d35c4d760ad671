"""Reacts to a signal at once, in a separate thread, even if the main thread is blocked.

Python runs signal handlers only in the main thread, which may be blocked in a collective that waits for a dead rank. So
Python's C handler writes a byte to a pipe, and a thread reads it (base/signals.py, Wakeup).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from hpcinit.base import signals
from hpcinit.runtime.process_state import state


def note(number: int, frame: FrameType | None) -> None:
    """A signal handler that only records the signal, so that a Watch can react to it.

    Without a Python handler, the signal would end the process.
    """
    state.early_signals.add(number)


def hold(number: int) -> None:
    """Prevent this signal from ending the process until a Watch handles it. Call this in the main thread."""
    held = signals.Handlers([number], note, only_free=True)
    # When Python exits, it removes its handlers some time before the process ends. The signal could then end a rank
    # whose program is complete, and the whole job would count as failed.
    atexit.register(held.ignore)


class Watch:
    """Calls `noted(number)` in a thread for each signal in `numbers` that arrives. Create it in the main thread.

    If the program has set its own handler, that handler is called too. Otherwise, the signal has no other effect.
    """

    def __init__(self, numbers: Iterable[int], noted: Callable[[int], None]) -> None:
        self._noted, self.wanted = noted, set[int]()
        self._handlers: list[signals.Handlers] = []
        self._wakeup = signals.Wakeup(self._woken)
        state.watches.add(self)
        self.listen(numbers, noted)

    def listen(self, numbers: Iterable[int], noted: Callable[[int], None]) -> None:
        """Call `noted` for these signals from now on, and also for signals that have already arrived."""
        before, self._noted, self.wanted = self.wanted, noted, set(numbers)
        self._handlers.append(signals.Handlers(self.wanted - before, note, only_free=True, restart_calls=True))
        for number in self.wanted & state.early_signals:
            noted(number)

    def close(self) -> None:
        """Restore the handlers. Call it in the main thread, or in a forked child."""
        state.watches.discard(self)
        self._wakeup.close()
        for handlers in self._handlers:
            handlers.restore()

    def _woken(self, number: int) -> None:
        if number in self.wanted:
            self._noted(number)


# A forked child inherits a Watch's handlers and pipe, so a signal to the child would reach the parent. The signals stay
# blocked until the child has removed both, because Python drops signals that arrive during a fork.


def _before_fork() -> None:
    state.masks[threading.get_ident()] = signals.block({number for watch in state.watches for number in watch.wanted})


def _after_fork() -> None:
    signals.set_blocked(state.masks.pop(threading.get_ident()))


# In the child, process_state closes the watches first: its module is imported earlier, so its hook runs earlier.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
