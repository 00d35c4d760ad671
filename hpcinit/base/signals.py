"""Handles signals. No other module installs handlers, blocks signals or waits for them.

There are four classes, for different kinds of processes:

- Handlers: a Python handler, which runs between two bytecodes of the main thread.
- Wakeup: a thread. It works even while the main thread is in C code, as in a collective that waits for a dead peer.
- Listener: a thread that waits for blocked signals and learns which process sent them.
- Descriptor: no thread, so that the process can fork safely. wait(timeout_s) returns the next blocked signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, "FrameType | None"], object]
# signalfd(2): close-on-exec, as in <sys/signalfd.h>. A read returns 128 bytes that start with the signal's number.
SFD_CLOEXEC = os.O_CLOEXEC
SIGNALFD_SIGINFO = 128


def block(numbers: Iterable[int]) -> set[int]:
    """Block these signals in this thread, and in threads and processes that it starts from now on.

    Return the signals that were already blocked.
    """
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, numbers)}


def unblock(numbers: Iterable[int]) -> None:
    """Unblock these signals in this thread. Signals that are pending are delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def set_blocked(numbers: Iterable[int]) -> None:
    """Block exactly these signals in this thread. Used to restore what block() returned."""
    signal.pthread_sigmask(signal.SIG_SETMASK, numbers)


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block these signals in this thread during the `with` block.

    A signal to the process goes to another thread, or stays pending if every thread blocks it.
    """
    before = block(numbers)
    try:
        yield
    finally:
        set_blocked(before)


@contextmanager
def unblocked(numbers: Collection[int]) -> Iterator[None]:
    """Unblock these signals during the `with` block. A process started in the block inherits them unblocked."""
    unblock(numbers)
    try:
        yield
    finally:
        block(numbers)


def reset(numbers: Iterable[int]) -> None:
    """Restore the default action of these signals. Call it from the main thread."""
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


def end_by(number: int) -> None:
    """End this process with the default action of signal `number`. It works in any thread."""
    ctypes.CDLL(None).signal(number, 0)  # 0: SIG_DFL; Python's signal.signal works only in the main thread
    unblock({number})
    os.kill(os.getpid(), number)


class Handlers:
    """Installs `handler` for each signal in `numbers`, from the main thread. restore() reinstalls the earlier handlers.

    only_free: skip signals for which the program already has a handler.
    restart_calls: let system calls of C libraries continue after the signal, instead of failing with EINTR.
    """

    def __init__(
        self, numbers: Iterable[int], handler: Handler, *, only_free: bool = False, restart_calls: bool = False
    ) -> None:
        self._handler, self._before = handler, {}
        for number in numbers:
            before = signal.getsignal(number)
            if only_free and before != signal.SIG_DFL:
                continue
            self._before[number] = before
            signal.signal(number, handler)
            if restart_calls:
                signal.siginterrupt(number, False)

    def ignore(self) -> None:
        """Ignore these signals from now on. Skip signals for which the program has since set a handler."""
        self._before = dict.fromkeys(self._before, signal.SIG_IGN)
        self.restore()

    def restore(self) -> None:
        """Reinstall the earlier handlers. Skip signals for which the program has since set a handler."""
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, before)


def collected(numbers: Iterable[int]) -> list[int]:
    """Return a list to which each of these signals is appended from now on. The signals no longer end the process."""
    came: list[int] = []
    Handlers(numbers, lambda number, frame: came.append(number))
    return came


@contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """During the `with` block, collect Ctrl-C, SIGTERM and SIGHUP in the yielded list instead of acting on them.

    Otherwise, an interrupt could end hpcinit after sbatch has created a job, but before its id is recorded. Signals
    that were ignored (by nohup, or by a script's `&`) stay ignored. Outside the main thread, nothing is deferred.
    """
    received: list[int] = []
    main = threading.current_thread() is threading.main_thread()  # only it may set signal handlers
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if main else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Wakeup:
    """A thread that calls `noted(number)` for each signal that has a Python handler. Create it in the main thread.

    Other users of Python's wake-up descriptor, such as asyncio, still get each signal.
    """

    def __init__(self, noted: Callable[[int], object]) -> None:
        self._noted = noted
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="hpcinit-signals", daemon=True).start()

    def close(self) -> None:
        """Restore the earlier wake-up descriptor. Call this from the main thread, or in a forked child."""
        signal.set_wakeup_fd(self._before)
        with contextlib.suppress(OSError):
            os.close(self._write)

    def _listen(self) -> None:
        while numbers := os.read(self._read, 64):
            if self._before != -1:
                with contextlib.suppress(OSError):
                    os.write(self._before, numbers)
            for number in numbers:
                self._noted(number)
        os.close(self._read)


class Listener:
    """A thread that waits for the signals `numbers` and calls `noted(number, sender)` for each.

    sender: the id of the process that sent the signal. A signal handler would not receive this id.

    The signals are blocked in the current thread and in threads that it starts later. So create this object before
    other threads.
    """

    def __init__(self, numbers: Collection[int], noted: Callable[[signal.Signals, int], object]) -> None:
        self._numbers, self._noted = numbers, noted
        block(numbers)
        threading.Thread(target=self._listen, name="hpcinit-signals", daemon=True).start()

    def _listen(self) -> None:
        while True:
            found = signal.sigwaitinfo(self._numbers)
            self._noted(signal.Signals(found.si_signo), found.si_pid)


class Descriptor:
    """Waits for the signals `numbers` without a thread. This process must have blocked them. Linux only.

    The class replaces signal.sigtimedwait, which has a bug in Python 3.11. If the process is stopped, and continues
    after the timeout, sigtimedwait returns a number from uninitialized memory. As a result, scontrol suspend and resume
    ended the job.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        mask = sum(1 << (number - 1) for number in numbers).to_bytes(128, "little")  # sigset_t
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.signalfd(-1, mask, SFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), f"cannot create a signalfd: {os.strerror(ctypes.get_errno())}")

    def wait(self, timeout_s: float, files: Iterable[int] = ()) -> int | None:
        """Return the next signal, or None after the timeout. Also return None as soon as one of `files` is readable."""
        if self._fd not in select.select([self._fd, *files], [], [], max(0.0, timeout_s))[0]:
            return None
        return int.from_bytes(os.read(self._fd, SIGNALFD_SIGINFO)[:4], sys.byteorder)

    def close(self) -> None:
        os.close(self._fd)
