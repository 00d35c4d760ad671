"""Signals are noted the moment they come, by a thread, whatever the main thread is in.

A Python handler runs between two bytecodes of the main thread: in a collective that waits for a dead peer it never
runs. The byte that the C handler writes (signal.set_wakeup_fd) is read by a thread of our own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from hpcinit.runtime.process_state import state


def note(number: int, frame: FrameType | None) -> None:
    """The handler: Python needs one, or the signal would end the process. What is to be done is done by a Watch."""
    state.early_signals.add(number)


def hold(number: int) -> None:
    """From now on this signal, which would end the process, waits for a Watch. From the main thread."""
    if signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, note)


class Watch:
    """Calls `noted(number)` in a thread for each of `signals` that comes. Make it in the main thread.

    A handler that the program has set stays and is called too; where there is none, the signal does nothing else.
    Others that listen on the wake-up descriptor (asyncio) go on hearing.
    """

    def __init__(self, signals: Iterable[int], noted: Callable[[int], None]) -> None:
        self._noted, self.wanted = noted, set(signals)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._ours = [number for number in self.wanted if signal.getsignal(number) == signal.SIG_DFL]
        for number in self._ours:
            signal.signal(number, note)
            signal.siginterrupt(number, False)  # system calls of C libraries go on
        threading.Thread(target=self._listen, name="hpcinit-signals", daemon=True).start()
        state.watches.add(self)
        for number in self.wanted & state.early_signals:
            noted(number)

    def die_of(self, number: int) -> None:
        """End the process as the signal would have ended it. From any thread."""
        # The handler in place is Python's, and only the main thread can change it: libc's own way.
        import ctypes  # noqa: PLC0415 - for this rare end only

        ctypes.CDLL(None).signal(number, 0)  # 0: SIG_DFL
        os.kill(os.getpid(), number)

    def close(self) -> None:
        """Put things back as they were. From the main thread, or in a forked child."""
        state.watches.discard(self)
        signal.set_wakeup_fd(self._before)
        for number in self._ours:
            if signal.getsignal(number) is note:
                signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.close(self._write)

    def _listen(self) -> None:
        while numbers := os.read(self._read, 64):
            if self._before != -1:
                with contextlib.suppress(OSError):
                    os.write(self._before, numbers)
            for number in numbers:
                if number in self.wanted:
                    self._noted(number)
        os.close(self._read)


# What a forked child inherits of a Watch: its handlers, and the pipe, by which a signal to the child would reach the
# parent. Signals wait until the child is rid of both: Python drops those that arrive while it forks.


def _before_fork() -> None:
    numbers = {number for watch in state.watches for number in watch.wanted}
    state.masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, state.masks.pop(threading.get_ident()))


# In the child process_state closes the watches first: it is imported before, so its hook is called before this one.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
