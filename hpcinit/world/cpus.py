"""Reads the CPUs and cores of this node from the kernel, and divides them among ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from hpcinit.base.safe_files import read_or_empty
from hpcinit.base.text import numbers

SYSFS = Path("/sys")
PROC = Path("/proc")


def share(cores: Sequence[Collection[int]], ranks: int, place: int) -> set[int]:
    """Return the CPUs of one of the ranks that share these cores.

    Each rank gets whole cores. If there are fewer cores than ranks, each gets single CPUs. If there are also fewer
    CPUs, every rank gets all of them.

    cores: the cores, each given as its CPUs.
    ranks: how many ranks share the cores.
    place: the number of this rank among them, from 0.
    """
    parts = [list(core) for core in cores]
    if len(parts) < ranks:
        parts = [[cpu] for core in parts for cpu in core]
    if len(parts) < ranks:
        return {cpu for part in parts for cpu in part}
    each, left = divmod(len(parts), ranks)
    first = place * each + min(place, left)
    return {cpu for part in parts[first : first + each + (place < left)] for cpu in part}


def everything(sysfs: Path = SYSFS, proc: Path = PROC) -> set[int]:
    """Return the CPUs that an unbound process of this job could use: those online and in the job's control group."""
    online = numbers((sysfs / "devices/system/cpu/online").read_text())
    for line in read_or_empty(proc / "self/cgroup").splitlines():
        # "0::/system.slice/job_7" is version 2, "4:cpuset:/slurm/job_7" version 1.
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = sysfs / "fs/cgroup", "cpuset.cpus.effective"
        elif "cpuset" in controllers.split(","):
            folder, name = sysfs / "fs/cgroup/cpuset", "cpuset.effective_cpus"
        else:
            continue
        # In a container, the path of the control group on the host may not exist.
        text = read_or_empty(folder / path.lstrip("/") / name) or read_or_empty(folder / name)
        online &= numbers(text) or online
    return online


def cores(near: set[int], sysfs: Path = SYSFS) -> list[list[int]]:
    """Group the CPUs in `near` by core, in the order of each core's first CPU."""
    found: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(near):
        siblings = read_or_empty(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(tuple(sorted(numbers(siblings) or {cpu})), []).append(cpu)
    return list(found.values())
