"""Adopts descendants whose parent died, and ends them all: no process of a local job outlives it.

Except other runs: a program may submit runs with cluster=local, whose engines this process adopts. They are
separate jobs, as on Slurm, and stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time

import psutil

ENGINE = ["-m", "hpcinit.local.engine"]  # in the command line of an engine, after Python
# prctl(2)
PR_SET_CHILD_SUBREAPER = 36  # orphaned descendants become children of this process, not of init
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent dies. Does nothing on systems other than Linux."""
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def _reap() -> None:
    """Reap every child that exited. Do not call this while another thread waits for a child."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _of_this_job() -> list[psutil.Process]:
    """Return the descendants of this process, without the engines of other runs and their descendants."""
    found, others = psutil.Process().children(recursive=True), set[psutil.Process]()
    for one in found:
        with contextlib.suppress(psutil.Error):  # it has ended
            if one.cmdline()[1:3] == ENGINE:
                others.update([one, *one.children(recursive=True)])
    return [one for one in found if one not in others]


def kill_descendants() -> None:
    """Send SIGKILL to the descendants of this job, including adopted orphans, until none is left.

    One pass is not enough: a process may fork after the list was read.
    """
    for _ in range(100):
        _reap()
        left = _of_this_job()
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def group_runs(group: int) -> bool:
    """Return whether a descendant of this process runs in this process group."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
