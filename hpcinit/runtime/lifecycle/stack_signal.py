"""Lets `hpcinit stacks` collect this rank's Python stacks. A thread writes them, or else a signal handler.

Normally, the thread writes the stacks of all threads to a file in memory when it receives a byte through a pipe. It has
the GIL while it writes, so the stacks do not change.

If C code holds the GIL, the thread cannot run. After some seconds, `hpcinit stacks` sends the thread a signal, and a
handler in C writes the stacks. This is less safe, because the stacks may change while the handler reads them: in a
test, 1 of 83 signals ended a program of several busy threads with a segmentation fault.

observe/stack_collector.py finds the file in /proc/PID/fd. The file's name contains everything that the collector needs.
After an exec, there is neither a file nor a handler, so the collector sends no signal.
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
    """Start the thread that writes the stacks for `hpcinit stacks`. If this process already has the thread, do nothing.

    Never raise, because the program can run without the thread. Some systems don't support it.
    """
    if state.stacks_of == os.getpid():
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError, StopIteration):
        number = next(one for one in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if _is_free(one))
        reads, writes = os.pipe()
        file: list[int] = []  # the file's name contains the thread's id, so the thread is created first
        thread = threading.Thread(target=_answer, args=(reads, file), name="hpcinit-stacks", daemon=True)
        thread.start()
        name = NAME.format(
            rank=rank,
            pid=os.getpid(),
            signal=number,
            main=threading.main_thread().ident,
            thread=thread.native_id,
            pipe=os.fstat(writes).st_ino,
        )
        file.append(os.memfd_create(name))
        fcntl.fcntl(file[0], fcntl.F_SETFL, os.O_APPEND)  # the collector empties the file before each request
        faulthandler.register(number, file=file[0], all_threads=True, chain=False)
        state.stacks_of = os.getpid()


def _answer(reads: int, file: list[int]) -> None:
    """Write the stacks of all threads for each byte that arrives.

    reads: the descriptor from which the bytes are read.
    file: a list that contains the descriptor of the output file. The list may be empty until the first byte arrives.
    """
    with contextlib.suppress(OSError):  # the program has closed one of them
        while os.read(reads, 1):
            faulthandler.dump_traceback(file=file[0], all_threads=True)


def _is_free(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_DFL
