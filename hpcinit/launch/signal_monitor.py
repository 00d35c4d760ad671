"""A process in a session of its own that tells whether a signal for this one came to its children too, and wakes it.

Where Slurm tracks processes by control group or by parents (proctrack/cgroup, linuxproc) it signals all that a task
has started, and to pass a signal on would make two of it: a program that requeues itself at USR1 would do so twice.
Where it tracks process groups (pgid), and on cluster=local, the ranks hear nothing of it: they have sessions of their
own.

A parent that somebody has stopped would not see a rank end, and the job would go on without it until its time limit.
"""

from __future__ import annotations

import os
import select
import signal
import time

from hpcinit.base import process_limits, signals
from hpcinit.launch import process_title

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
WITHIN_S = 0.3  # Slurm signals one process after the other
LOOK_S = 5.0


class SignalMonitor:
    """Make it while this process has one thread and little memory."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _listen(write, parent)
        os.close(write)

    def saw(self, number: int) -> bool:
        """Did `number`, which has just come here, come there too?"""
        deadline = time.monotonic() + WITHIN_S
        while (left := deadline - time.monotonic()) > 0 and select.select([self._read], [], [], left)[0]:
            heard = os.read(self._read, 1)
            if not heard:  # it was killed
                return False
            if heard[0] == number:
                return True
        return False

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def forget(self) -> None:
        """In a child: the witness is the parent's."""
        os.close(self._read)


def _listen(write: int, parent: int) -> None:
    signals.block(FORWARDED)
    os.setsid()
    process_limits.die_with_parent_process(parent)
    process_title.call_this("hpcinit: hears signals")
    came = signals.Descriptor(FORWARDED)
    while True:
        number = came.wait(LOOK_S)
        if number is not None:
            os.write(write, bytes([number]))
        elif process_title.state(parent) == "T" and any(
            process_title.state(child) == "Z" for child in process_title.children(parent)
        ):
            os.kill(parent, signal.SIGCONT)
