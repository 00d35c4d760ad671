"""Starts a helper process in its own session, which detects whether Slurm also signals this process's children.

If Slurm tracks processes by control group or by parents (proctrack/cgroup, linuxproc), it signals all processes that a
task has started. Forwarding the signal would then deliver it twice: a program that requeues itself at USR1 would do so
twice. If Slurm tracks process groups (pgid), and with cluster=local, the ranks do not get the signal, because they have
their own sessions.

The helper also continues a stopped fork server or a stopped agent of launch=torchrun. Otherwise that process would not
see a rank end, and the job would continue without the rank until its time limit.
"""

from __future__ import annotations

import os
import select
import signal
import time

from hpcinit.base import processes, signals

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
WITHIN_S = 0.3  # Slurm signals the processes one after the other
LOOK_S = 5.0


class SignalMonitor:
    """A helper process that reports the signals it receives.

    Create it while this process has one thread and little memory.
    """

    def __init__(self) -> None:
        self._read, write = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _listen(write, parent)
        os.close(write)

    def also_received(self, number: int) -> bool:
        """Return whether the signal `number`, which this process has just received, also reached the helper."""
        deadline = time.monotonic() + WITHIN_S
        while (left := deadline - time.monotonic()) > 0 and select.select([self._read], [], [], left)[0]:
            data = os.read(self._read, 1)
            if not data:  # the helper was killed
                return False
            if data[0] == number:
                return True
        return False

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def forget(self) -> None:
        """Close the pipe to the helper. Call this in a forked child, because the helper belongs to the parent."""
        os.close(self._read)


def _listen(write: int, parent: int) -> None:
    """Run the helper: report each signal, and continue a stopped parent whose child has exited. Never return."""
    signals.block(FORWARDED)
    os.setsid()
    processes.die_with_parent(parent)
    processes.set_title("hpcinit: signal monitor")
    received = signals.Descriptor(FORWARDED)
    while True:
        number = received.wait(LOOK_S)
        if number is not None:
            os.write(write, bytes([number]))
        elif processes.state(parent) == "T" and any(
            processes.state(child) == "Z" for child in processes.children(parent)
        ):
            os.kill(parent, signal.SIGCONT)
