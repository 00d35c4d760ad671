"""How many files and connections a rank may have open (RLIMIT_NOFILE)."""

from __future__ import annotations

import contextlib
import resource

# Connections with each other rank: gloo connects all ranks of a group. A run has the default group, up to five groups
# of its mesh, those of should_stop() and save(), and on rank 0 the rendezvous and torch's store.
PER_RANK = 10
BESIDES = 1024  # the program's own; the usual soft limit


def allow(ranks: int) -> None:
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
