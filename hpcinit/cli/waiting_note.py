"""Prints a line in a terminal while a command of Slurm does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcinit.base import console

SLOW_S = 1.0
SLURM = {"sacct", "sbatch", "scontrol", "sinfo", "squeue"}


@contextmanager
def shown(name: str) -> Iterator[None]:
    """Print 'hpcinit status: waiting for squeue', once, if a command of Slurm runs for more than a second."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(name, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(name: str, over: threading.Event) -> None:
    before: set[tuple[str, str]] = set()
    while not over.wait(SLOW_S):
        running = set(_children())
        if slow := sorted(before & running):
            console.note(f"hpcinit {name}: waiting for {slow[0][1]}")
            return
        before = running


def _children() -> Iterator[tuple[str, str]]:
    """Yield (process id, name) for each command of Slurm that this process has started; none without Linux."""
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            for pid in task.read_text().split():
                if (command := Path(f"/proc/{pid}/comm").read_text().strip()) in SLURM:
                    yield pid, command
        except OSError:  # the thread or process has just ended
            continue
