"""Signals to the process group of a child that leads one, only while its number cannot belong to another process."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress


def status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a child that has ended, -9 for SIGKILL, without reaping it; None while it runs.

    Until it is reaped (Popen.poll, Popen.wait) the kernel gives its number, which is also its group's, to no other
    process.
    """
    if process.returncode is not None:
        return process.returncode
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll()
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # SIGCHLD is ignored, so the kernel has reaped it
        return process.poll()
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the group that a child leads. A child that was reaped leads none: do nothing."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
            os.killpg(process.pid, number)
