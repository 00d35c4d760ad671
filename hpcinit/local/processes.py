"""Processes that leave no orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time

import psutil

ENV_ENGINE = "HPCINIT_ENGINE"  # environment variable: the engine's process id, in all that it starts

# prctl(2)
PR_SET_CHILD_SUBREAPER = 36  # orphaned descendants become children of this process, not of init
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies. Linux only; elsewhere nothing."""
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap() -> None:
    """Collect every child that has ended. Not while somebody waits for one of them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_descendants() -> None:
    """SIGKILL to everything that this process started, adopted orphans included, until nothing is left.

    One look is not enough: what forks meanwhile has children that were not seen.
    """
    for _ in range(100):
        reap()
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def group_runs(group: int) -> bool:
    """Return whether a process of this group, started by this one or adopted, has not ended."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
