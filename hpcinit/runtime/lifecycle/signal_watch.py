"""Signals to a rank are noted the moment they come, by a thread, whatever the main thread is in.

A Python handler runs between two bytecodes of the main thread: in a collective that waits for a dead peer it never
runs. The byte that the C handler writes is read by a thread of our own (base/signals.py, Wakeup).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from hpcinit.base import signals
from hpcinit.rendezvous.process_state import state


def note(number: int, frame: FrameType | None) -> None:
    """The handler: Python needs one, or the signal would end the process. What is to be done is done by a Watch."""
    state.early_signals.add(number)


def hold(number: int) -> None:
    """From now on this signal, which would end the process, waits for a Watch. From the main thread."""
    signals.Handlers([number], note, only_free=True)


class Watch:
    """Calls `noted(number)` in a thread for each of `numbers` that comes. Make it in the main thread.

    A handler that the program has set stays and is called too; where there is none, the signal does nothing else.
    """

    def __init__(self, numbers: Iterable[int], noted: Callable[[int], None]) -> None:
        self._noted, self.wanted = noted, set(numbers)
        self._wakeup = signals.Wakeup(self._woken)
        self._handlers = signals.Handlers(self.wanted, note, only_free=True, restart_calls=True)
        state.watches.add(self)
        for number in self.wanted & state.early_signals:
            noted(number)

    def close(self) -> None:
        """Put things back as they were. From the main thread, or in a forked child."""
        state.watches.discard(self)
        self._wakeup.close()
        self._handlers.restore()

    def _woken(self, number: int) -> None:
        if number in self.wanted:
            self._noted(number)


# What a forked child inherits of a Watch: its handlers, and the pipe, by which a signal to the child would reach the
# parent. Signals wait until the child is rid of both: Python drops those that arrive while it forks.


def _before_fork() -> None:
    state.masks[threading.get_ident()] = signals.block({number for watch in state.watches for number in watch.wanted})


def _after_fork() -> None:
    signals.set_blocked(state.masks.pop(threading.get_ident()))


# In the child process_state closes the watches first: it is imported before, so its hook is called before this one.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
