"""Which Slurm step created this process, as the kernel sees it: an environment can be inherited, parents cannot.

A batch script that was submitted from inside a step of the same shape has exactly the environment of a real rank 0
(tests/data/worlds: nested_same_shape). Only the slurmstepd above it differs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Slurm's cgroups, version 1 and 2: /slurm/uid_1000/job_43/step_0/task_1, .../slurmstepd.scope/job_43/step_batch/user.
_CGROUP = re.compile(r"/job_(\d+)/step_(\w+)")
# slurmstepd sets its process title to "slurmstepd: [43.0]" or "slurmstepd: [43.batch]".
_TITLE = re.compile(r"slurmstepd: \[(\d+)(?:\+\d+)?\.(\w+)")
GENERATIONS = 64


@dataclass(frozen=True)
class Process:
    """pid: of this process; 0 if unknown. step: 'JOB.STEP' of the slurmstepd above it, such as '43.0' or '43.batch'.

    step is '' if no slurmstepd is visible, which proves nothing (containers, hidepid).
    """

    pid: int = 0
    step: str = ""


UNKNOWN = Process()


def slurm_step_of_this_process(proc: Path = Path("/proc")) -> Process:
    """Return this process. Raise nothing: what cannot be read stays empty."""
    return Process(os.getpid(), _from_cgroup(proc) or _from_parents(proc))


def _from_cgroup(proc: Path) -> str:
    found = _CGROUP.search(_read(proc / "self/cgroup"))
    return f"{found[1]}.{found[2]}" if found else ""


def _from_parents(proc: Path) -> str:
    titles = (_TITLE.match(line) for line in command_lines(os.getpid(), proc))
    return next((f"{found[1]}.{found[2]}" for found in titles if found), "")


def command_lines(pid: int, proc: Path = Path("/proc")) -> Iterator[str]:
    """Yield the command lines of process `pid` and its parents, the nearest first, with NUL between arguments. Stop at
    the first process that is not visible."""
    for _ in range(GENERATIONS):
        yield _read(proc / str(pid) / "cmdline")
        # "4242 (name with ) and blanks) S 4241 ...": the parent is the second field after the last bracket.
        words = _read(proc / str(pid) / "stat").rpartition(")")[2].split()
        if len(words) < 2 or int(words[1]) < 2:
            return
        pid = int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
