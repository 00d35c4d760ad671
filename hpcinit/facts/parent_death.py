"""A process that does not outlive its parent, however that one ends. Linux only; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2): the signal that this process gets when its parent dies
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # here, as a preexec_fn should import nothing


def end_with(parent: int) -> None:
    """SIGTERM for this process when `parent`, its parent, dies."""
    _signal_at_death_of(parent, signal.SIGTERM)


def die_with(parent: int) -> None:
    """The same with SIGKILL: a shell that traps SIGTERM acts on it only when its foreground command has ended, and a
    rank takes SIGTERM for a wish to save."""
    _signal_at_death_of(parent, signal.SIGKILL)


def _signal_at_death_of(parent: int, number: int) -> None:
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before prctl, which then says nothing of it
        os._exit(128 + number)
