"""Lets `hpcinit stacks` collect this rank's Python stacks: a thread writes them, or a signal handler if it cannot run.

The thread waits for a byte in a pipe. Then it writes the stacks of all threads to a file in memory. The thread has the
GIL while it writes, so the stacks do not change.

If C code keeps the GIL, the thread cannot run. After some seconds, the collector sends a signal to this thread, and a
handler in C writes the stacks. This is less safe, because the handler may read stacks while they change: in a program
whose threads ran Python code, one of 83 signals ended the process with a segmentation fault. So the collector sends the
signal only if the thread does not answer. No thread of the program is interrupted.

The name of the file contains all that observe/stack_collector.py needs. The collector finds the name in /proc/PID/fd.
The file and the handler both disappear with exec, so a process without the handler never gets the signal.
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
    """Start the thread that writes the stacks for `hpcinit stacks`. If this process already has it, do nothing.

    Never raise, because the program can run without the thread. Some systems don't support it.
    """
    if state.stacks_of == os.getpid():
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError, StopIteration):
        number = next(one for one in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if _is_free(one))
        reads, writes = os.pipe()
        file: list[int] = []  # its name contains the thread's id, so it is made after the thread
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
