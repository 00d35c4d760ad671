"""Limits of a process: it ends when its parent dies (Linux only), and the number of files that it may open."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2): the signal that this process gets when its parent dies
_libc = (
    ctypes.CDLL(None) if sys.platform == "linux" else None
)  # loaded here, because a preexec_fn should import nothing


def terminate_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when `parent`, its parent, dies."""
    _signal_at_death_of(parent, signal.SIGTERM)


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when `parent`, its parent, dies.

    SIGTERM is not enough: a shell that traps it waits for its foreground command, and a rank tries to save.
    """
    _signal_at_death_of(parent, signal.SIGKILL)


def _signal_at_death_of(parent: int, number: int) -> None:
    """Have the kernel send the signal when the parent dies; exit now if it is dead already."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before prctl, which then sends nothing
        os._exit(128 + number)


# Open files (RLIMIT_NOFILE) per other rank: gloo connects all ranks of a group. A run has the default group, up to five
# groups of its mesh, those of should_stop() and save(), and on rank 0 the rendezvous and torch's store.
PER_RANK = 10
BESIDES = 1024  # for the program itself; the usual soft limit


def raise_open_files_limit(ranks: int) -> None:
    """Raise this process's soft limit of open files to what a job of `ranks` needs, or to the hard limit if lower.

    Child processes inherit the limit. Raise nothing: a limit that is too low is reported when a connection fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = PER_RANK * ranks + BESIDES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    with contextlib.suppress(ValueError, OSError):
        most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


ENV_PARENT = "HPCINIT_PARENT"  # process id of an agent, in the environment of its ranks


def die_with_agent() -> None:
    """Have the kernel send SIGKILL to this process when the agent in ENV_PARENT dies, however it ends.

    Not SIGTERM: with run.should_stop() a rank would try to save, and never finish without its peers. The variable is
    removed, because child processes of this process have another parent.
    """
    parent = os.environ.pop(ENV_PARENT, "")
    if parent.isdigit():
        die_with_parent(int(parent))
