"""How soon the door's thread gets its turn while rank 0's program imports and computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Python lets a thread that wants to go on wait 5 ms for one that computes, and the door's thread wants to after every
# system call, of which a guest takes a dozen: 60 ms for each rank, while rank 0 imports torch. It costs the program
# nothing while nobody is at the door.
QUICK_S = 0.00002

_lock = threading.Lock()
_doors = 0
_before = 0.0


@contextmanager
def quick() -> Iterator[None]:
    """sys.setswitchinterval for the whole process, until the last of its doors is closed. A program's own stays."""
    global _doors, _before  # noqa: PLW0603 - so is the interval
    with _lock:
        if not _doors:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(QUICK_S)
        _doors += 1
    try:
        yield
    finally:
        with _lock:
            _doors -= 1
            if not _doors and abs(sys.getswitchinterval() - QUICK_S) < 1e-9:
                sys.setswitchinterval(_before)
