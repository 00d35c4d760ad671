"""Processes that leave no orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2): the signal that this process gets when its parent dies
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """SIGTERM for this process when its parent dies, however it dies. Linux only; elsewhere nothing."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def signal_group(group: int, number: int) -> bool:
    """Send `number` (0: only ask) to a process group. False if there is none."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of a group of zombies
        return False
    return True
