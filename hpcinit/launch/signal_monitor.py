"""Detects whether Slurm sends a signal not only to this process, but also to its ranks.

If it does, this process must not forward the signal: a program that requeues its job on USR1 would requeue it twice.
Slurm signals the ranks too if it tracks processes by control group or by parent (proctrack/cgroup, linuxproc). With
proctrack/pgid or cluster=local, the ranks get no signal, because they have their own sessions. So a helper process in
its own session shows whether Slurm signals the ranks.

The helper also sends SIGCONT to its parent (a fork server, or an agent of launch=torchrun) if the parent is stopped and
a rank has ended. Otherwise, the job would continue without this rank until its time limit.
"""

from __future__ import annotations

import os
import select
import signal
import time

from hpcinit.base import processes, signals

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
WITHIN_S = 0.3  # the helper may get a signal this much later than its parent
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
