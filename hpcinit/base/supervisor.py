"""Supervises child processes: starts each in its own session, signals and reaps them, and stops all after a failure.

Slurm's step daemon supervises ranks that srun starts. hpcinit itself supervises the ranks of launch=fork
(launch/fork_server), of launch=torchrun (launch/torchrun) and of the local engine (engine/). Each of these has a
subclass of Supervisor that overrides the hooks.

A child that has exited is reaped as late as possible. Until then the kernel cannot reuse its process id, which is also
the id of its process group. So a signal to the group never reaches an unrelated process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

LOOK_S = 0.02


class Child:
    """A child process that leads its own session and process group.

    number: identifies the child, for example by its rank.
    code: the exit status after the child is reaped; -9 if SIGKILL ended it.
    """

    def __init__(self, number: int, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.number, self.pid, self._process = number, pid, process
        self.code: int | None = None

    def ended(self) -> int | None:
        """Return the child's exit status without reaping it, or None while it is running."""
        if self.code is not None:
            return self.code
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._polled()
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # SIGCHLD is ignored, so the kernel has reaped it
            return self._polled()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def signal(self, number: int) -> None:
        """Send a signal to the child and its child processes. Do nothing after the child was reaped."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):  # PermissionError on macOS: a group of zombies
                try:
                    os.killpg(self.pid, number)
                except ProcessLookupError:
                    if self._process is None:  # the child is forked but not yet in its own session
                        os.kill(self.pid, number)

    def reap(self) -> None:
        """Reap a child that has exited, so that the kernel can reuse its process id."""
        if self._process is not None:
            self.code = self._process.wait()
        elif self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _polled(self) -> int | None:
        self.code = self._process.poll() if self._process is not None else None
        return self.code


class Supervisor:
    """Supervises child processes.

    children: every child that was ever started, by number.
    """

    stuck_s = 10.0  # how long to wait after SIGKILL for a child that the kernel does not end

    def __init__(self) -> None:
        self.children: dict[int, Child] = {}
        self._kill_at: float | None = None  # time.monotonic()
        self._leave_at: float | None = None
        self._reported: set[int] = set()

    # --- starting

    def start(
        self,
        number: int,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        output: IO[bytes] | None = None,
        folder: Path | str | None = None,
        in_child: Callable[[], object] | None = None,
    ) -> Child:
        """Start `command` in its own session.

        number: how to identify the child.
        output: the file for stdout and stderr; None: those of this process.
        folder: the working folder.
        in_child: a function to call in the child before it runs the command.

        Raise OSError if the process cannot be started.
        """
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=in_child,
        )
        self.children[number] = Child(number, process.pid, process)
        return self.children[number]

    def fork_child(self, number: int) -> bool:
        """Fork, and return True in the child, which must then call os.setsid(). Return False in the parent."""
        pid = os.fork()
        if pid == 0:
            return True
        self.children[number] = Child(number, pid)
        return False

    # --- hooks for subclasses

    def on_exit(self, child: Child) -> bool:
        """Handle the exit of a child. supervise() calls this once per child. Return True to end supervise()."""
        return False

    def on_signal(self, number: int) -> bool:
        """Handle a signal that this process received. Return True to end supervise()."""
        self.signal(number)
        return False

    def on_stuck(self, running: Sequence[Child]) -> None:
        """Handle children that still exist `stuck_s` seconds after SIGKILL. supervise() ends after this call."""

    def is_over(self) -> bool:
        """Return whether supervise() should end although children are still running."""
        return False

    # --- supervising

    def supervise(self, next_signal: Callable[[float], int | None]) -> None:
        """Call the hooks until all children have exited.

        next_signal: waits for a signal up to the given number of seconds, and returns the signal or None.
        """
        while self.left() and not self.is_over():
            if self._kill_if_due():
                self.on_stuck(self.running())
                return
            deadline = self.deadline()
            number = next_signal(1.0 if deadline is None else max(0.0, deadline - time.monotonic()))
            if number is not None and number != signal.SIGCHLD and self.on_signal(number):
                return
            for child in self.left():
                if child.ended() is not None:
                    self._reported.add(child.number)
                    if self.on_exit(child):
                        return

    def kill_in(self, seconds: float) -> None:
        """Make supervise() or stop() send SIGKILL after `seconds` to the children that are still running."""
        self._kill_at = time.monotonic() + seconds

    def terminate(self, grace_s: float) -> None:
        """Send SIGTERM now, and schedule a SIGKILL for the children that are still running after `grace_s` seconds.

        supervise() or stop() sends the SIGKILL.
        """
        self.signal(signal.SIGTERM)
        self.kill_in(grace_s)

    def stop(self, grace_s: float, *, terminated: bool = False) -> None:
        """Terminate the children, wait for them without calling hooks, and kill what is left of their process groups.

        grace_s: seconds before SIGKILL.
        terminated: whether the children have already received SIGTERM. A second SIGTERM would interrupt
        their handling of the first.
        """
        if terminated:
            self.kill_in(grace_s)
        else:
            self.terminate(grace_s)
        while self.running() and not self._kill_if_due():
            time.sleep(LOOK_S)
        for child in self.children.values():
            child.signal(signal.SIGKILL)
            if child.ended() is not None:  # otherwise the kernel does not end it
                child.reap()

    def _kill_if_due(self) -> bool:
        """Send SIGKILL if it is due. Return True if children still exist `stuck_s` seconds after the SIGKILL."""
        if (deadline := self.deadline()) is None or time.monotonic() < deadline:
            return False
        if self._kill_at is None:
            return True
        self.signal(signal.SIGKILL)
        self._kill_at, self._leave_at = None, time.monotonic() + self.stuck_s
        return False

    def deadline(self) -> float | None:
        """Return the time.monotonic() of supervise()'s next action, or None if none is scheduled."""
        return self._leave_at if self._kill_at is None else self._kill_at

    def left(self) -> list[Child]:
        """Return the children for which on_exit() has not been called yet."""
        return [child for child in self.children.values() if child.number not in self._reported]

    def running(self) -> list[Child]:
        """Return the children that have not exited."""
        return [child for child in self.children.values() if child.ended() is None]

    def ended(self) -> dict[int, int]:
        """Return the exit statuses of the children that have exited, by number."""
        found = ((child.number, child.ended()) for child in self.children.values())
        return {number: status for number, status in found if status is not None}

    def signal(self, number: int) -> None:
        """Send a signal to the running children and their child processes."""
        for child in self.running():
            child.signal(number)
