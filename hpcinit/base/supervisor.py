"""Child processes that end together: started in sessions, signalled as groups, reaped, and ended on a bad exit.

Slurm's step daemon does this for ranks that srun starts. hpcinit does it for ranks of launch=fork
(launch/fork_server), of launch=torchrun (launch/torchrun) and of the local engine (local). Each of them is a subclass
of Supervisor, whose hooks say what is special.

A child that has ended is reaped late: until then the kernel gives its number, which is also its group's, to no other
process, so that a signal to the group never reaches a stranger.
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
    """A process that leads its own session, and so a process group. number: what its supervisor calls it.

    code: its exit status once it was reaped; -9 for one that SIGKILL ended.
    """

    def __init__(self, number: int, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.number, self.pid, self._process = number, pid, process
        self.code: int | None = None

    def ended(self) -> int | None:
        """Return the exit status of a child that has ended, without reaping it; None while it runs."""
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
        """Signal the child and what it has started. Do nothing if it was reaped."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):  # PermissionError on macOS: a group of zombies
                try:
                    os.killpg(self.pid, number)
                except ProcessLookupError:
                    if self._process is None:  # forked, and it has no session yet
                        os.kill(self.pid, number)

    def reap(self, timeout_s: float | None = None) -> None:
        """Wait for its end. Raise TimeoutExpired; a forked child must have ended already."""
        if self._process is not None:
            self.code = self._process.wait(timeout_s)
        elif self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _polled(self) -> int | None:
        self.code = self._process.poll() if self._process is not None else None
        return self.code


class Supervisor:
    """children: all that were started, by number, also those that have ended."""

    stuck_s = 10.0  # from SIGKILL on, for a child that the kernel does not end

    def __init__(self) -> None:
        self.children: dict[int, Child] = {}
        self._kill_at: float | None = None  # by time.monotonic(), as is the next
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
        """Start `command` in a session. output: for stdout and stderr, None for this process's. Raise OSError."""
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
        """Fork. Return True in the child, which must call os.setsid()."""
        pid = os.fork()
        if pid == 0:
            return True
        self.children[number] = Child(number, pid)
        return False

    # --- hooks: what is special of one kind of children

    def on_exit(self, child: Child) -> bool:
        """Called once for each child that has ended. Return True to end supervise()."""
        return False

    def on_signal(self, number: int) -> bool:
        """Called for each signal to this process. Return True to end supervise()."""
        self.signal(number)
        return False

    def on_stuck(self, running: Sequence[Child]) -> None:
        """Called where children have not ended `stuck_s` after SIGKILL; supervise() then ends."""

    def is_over(self) -> bool:
        """Whether supervise() ends although children are left."""
        return False

    # --- supervising

    def supervise(self, next_signal: Callable[[float], int | None]) -> None:
        """Call the hooks until all have ended. next_signal(timeout_s): waits for a signal, None if none comes."""
        while self.left() and not self.is_over():
            if (deadline := self.deadline()) is not None and time.monotonic() >= deadline:
                if self._kill_at is None:
                    self.on_stuck(self.running())
                    return
                self.signal(signal.SIGKILL)
                self._kill_at, self._leave_at = None, time.monotonic() + self.stuck_s
                continue
            number = next_signal(1.0 if deadline is None else max(0.0, deadline - time.monotonic()))
            if number is not None and number != signal.SIGCHLD and self.on_signal(number):
                return
            for child in self.left():
                if child.ended() is not None:
                    self._reported.add(child.number)
                    if self.on_exit(child):
                        return

    def kill_in(self, seconds: float) -> None:
        """While supervise() goes on: SIGKILL to those that still run then."""
        self._kill_at = time.monotonic() + seconds

    def deadline(self) -> float | None:
        """When supervise() does something by itself, by time.monotonic(); None where it only waits."""
        return self._leave_at if self._kill_at is None else self._kill_at

    def left(self) -> list[Child]:
        """Return those whose end on_exit() was not called for."""
        return [child for child in self.children.values() if child.number not in self._reported]

    def running(self) -> list[Child]:
        """Return those that have not ended."""
        return [child for child in self.children.values() if child.ended() is None]

    def ended(self) -> dict[int, int]:
        """Return the exit status, by number, of those that have ended."""
        found = ((child.number, child.ended()) for child in self.children.values())
        return {number: status for number, status in found if status is not None}

    def signal(self, number: int) -> None:
        """Signal those that run, and what they have started."""
        for child in self.running():
            child.signal(number)

    def stop(self, grace_s: float, reap_s: float | None = None) -> None:
        """SIGTERM, and after the grace time SIGKILL to whatever is left of any child; then reap all.

        reap_s: how long to wait for one that the kernel does not end; None: until it ends.
        """
        if self.running():
            self.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and self.running():
                time.sleep(LOOK_S)
        for child in self.children.values():
            child.signal(signal.SIGKILL)
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.reap(reap_s)
