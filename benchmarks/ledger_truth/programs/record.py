"""The truth of one process: it appends what it starts and ends, with the time, to a file outside of the run folder.

The folder is in the environment variable LEDGER_TRUTH. Each line is on the disk before the program continues.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TAGS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")
_open: dict[str, int] = {}


def process_start() -> float:
    """Return when the kernel made this process, to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def begin(first: float, rank: int) -> None:
    """Open the file of this process. first: the time of the program's first line."""
    folder = Path(os.environ["LEDGER_TRUTH"])
    path = folder / f"rank-{rank}-{os.getpid()}-{int(first * 1000)}.jsonl"
    _open["file"] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    tags = {name: os.environ.get(name, "") for name in TAGS}
    mark("process", process_start(), rank=rank, pid=os.getpid(), host=os.uname().nodename, **tags)
    mark("first", first)


def mark(kind: str, at: float | None = None, **more: object) -> None:
    """Append an event with its time, which is now unless `at` is given."""
    at = time.time() if at is None else at
    os.write(_open["file"], (json.dumps({"kind": kind, "at": at, **more}) + "\n").encode())
    os.fsync(_open["file"])


def fail(faults: Iterable[dict[str, Any]], step: int, rank: int) -> None:
    """Do what the plan wants at this step, each fault only once in the run."""
    for number, fault in enumerate(faults):
        if fault["by"] != "program" or step < fault["step"] or rank != fault["rank"]:
            continue
        try:
            os.close(os.open(f"fault-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        mark(fault["kind"], fault=number)
        if fault["kind"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault["kind"] == "raise":
            raise ValueError("the plan wants this error")
        time.sleep(10**6)
