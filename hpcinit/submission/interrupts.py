"""Ctrl-C, a closed terminal and SIGTERM while a job is being submitted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[list[int]]:
    """Ctrl-C between sbatch's start and the record of its job id would lose a job: note it, act after.

    A closed terminal (SIGHUP) and SIGTERM too. What is ignored (nohup, a script's `&`) stays ignored.
    """
    noted: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # signals come to no other
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
