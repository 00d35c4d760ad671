"""Finds how much memory this process can still allocate, on its node and within its memory cgroups."""

from __future__ import annotations

import re
from pathlib import Path

from hpcinit.base.safe_files import read_or_empty

CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


def free_bytes(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Return how many bytes this process can still allocate, or 0 if that is unknown.

    Memory may be limited by the node and by each memory cgroup that contains this process. The smallest remaining
    amount counts. If a process exceeds its cgroup's limit, the kernel kills it instead of refusing the allocation.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read_or_empty(proc / "meminfo"), re.MULTILINE)
    left = [int(found[1]) * 1024 if found else 0]
    # "0::/system.slice/slurmstepd.scope/job_42/step_0" is version 2, "4:memory:/slurm/uid_0/job_42" version 1.
    for line in read_or_empty(proc / "self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:
            top, limit, used, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in kinds.split(","):
            top, limit = cgroups / "memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            most, now = (read_or_empty(folder / name) for name in (limit, used))
            if most.isdigit() and now.isdigit():
                old = re.search(rf"^{cache} (\d+)$", read_or_empty(folder / "memory.stat"), re.MULTILINE)
                left.append(int(most) - int(now) + (int(old[1]) if old else 0))
            if folder == top:
                break
    return max(0, min(left))
