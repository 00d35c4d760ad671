"""Limits of a process: its life ends with its parent's (Linux only), and how many files it may have open."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2): the signal that this process gets when its parent dies
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # here, as a preexec_fn should import nothing


def end_with_parent_process(parent: int) -> None:
    """SIGTERM for this process when `parent`, its parent, dies."""
    _signal_at_death_of(parent, signal.SIGTERM)


def die_with_parent_process(parent: int) -> None:
    """The same with SIGKILL: a shell that traps SIGTERM acts on it only when its foreground command has ended, and a
    rank takes SIGTERM for a wish to save."""
    _signal_at_death_of(parent, signal.SIGKILL)


def _signal_at_death_of(parent: int, number: int) -> None:
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before prctl, which then says nothing of it
        os._exit(128 + number)


# How many files and connections a rank may have open (RLIMIT_NOFILE).

# Connections with each other rank: gloo connects all ranks of a group. A run has the default group, up to five groups
# of its mesh, those of should_stop() and save(), and on rank 0 the rendezvous and torch's store.
PER_RANK = 10
BESIDES = 1024  # the program's own; the usual soft limit


def raise_open_files_limit(ranks: int) -> None:
    """Raise this process's soft limit to what a job of `ranks` needs, or to the hard limit if that is lower.

    What it starts inherits the limit. Raises nothing: a limit that is too low is reported where a connection fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = PER_RANK * ranks + BESIDES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    with contextlib.suppress(ValueError, OSError):
        most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


# No rank outlives the agent that started it, however that one ends.

ENV_PARENT = "HPCINIT_PARENT"  # process id of an agent, in the environment of its ranks


def die_with_parent() -> None:
    """SIGKILL for this process when the parent that ENV_PARENT names dies. Without the variable nothing.

    Not SIGTERM: with run.should_stop() a rank takes that for a wish to save, and with its peers gone it never comes to
    it. What this process starts is not meant: the variable is taken out.
    """
    parent = os.environ.pop(ENV_PARENT, "")
    if parent.isdigit():
        die_with_parent_process(int(parent))
