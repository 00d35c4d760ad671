"""A thread that lets `hpcinit stacks` ask this rank for its Python stacks, also while C code keeps the GIL.

A signal to that thread makes a handler in C write the stacks of all threads to a file in memory. No other thread is
interrupted. A pipe shows whether C code keeps the GIL: the thread reads single bytes, and without the GIL it gets only
one. The file's name contains all that observe/stack_collector.py needs, which finds it in /proc/PID/fd. The file and
the handler both end with exec, so a process without the handler never gets the signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import threading

from hpcinit.runtime.process_state import state

# Parsed by observe/stack_collector.py. main: number of the main thread. thread: native id of the thread to signal.
NAME = "hpcinit-stacks {rank} {pid} {signal} {main:#018x} {thread} {pipe}"


def install(rank: int) -> None:
    """Start the thread, once per process. Never raise: not every system can do it, and the program runs without it."""
    if state.stacks_of == os.getpid():
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError, StopIteration):
        number = next(one for one in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if _is_free(one))
        reads, writes = os.pipe()
        thread = threading.Thread(target=_answer, args=(reads,), name="hpcinit-stacks", daemon=True)
        thread.start()
        name = NAME.format(
            rank=rank,
            pid=os.getpid(),
            signal=number,
            main=threading.main_thread().ident,
            thread=thread.native_id,
            pipe=os.fstat(writes).st_ino,
        )
        file = os.memfd_create(name)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # the collector empties the file before each signal
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        state.stacks_of = os.getpid()


def _answer(reads: int) -> None:
    with contextlib.suppress(OSError):  # the program has closed it
        while os.read(reads, 1):
            pass


def _is_free(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_DFL
