"""Finds processes and files in /dev/shm that this user's ended jobs left on this node. The module only reports them.

It never ends a process or removes a file, because no check on this node can prove that nothing needs them. Some things
look like leftovers but are not:

- Ranks of another job of this user. squeue omits jobs in hidden partitions, and a site may cache squeue's output. The
  tasks of a heterogeneous job have the leader's job id, while squeue lists the components.
- A tmux or a server that the user started in a job and that outlives the job on purpose. It has the job's variables.
- Tensors that a program outside Slurm passes through a queue. With torch's strategy file_system, no process maps their
  files, and the process id in a file's name may belong to another pid namespace.

A process is reported only if scontrol or sacct shows a final state for every job in its environment and control group.
Nothing is reported if Slurm does not reply, or outside a Slurm job.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from hpcinit.engine import from_environment
from hpcinit.records.node_facts import Leftover, OldFiles
from hpcinit.records.timeline import ENV_ALLOCATED
from hpcinit.slurm import queue, slurm_client

# The variables that prove that a process was a task of a step, and of which job and node. The shell of salloc has no
# SLURM_PROCID.
JOB, NODE, CLUSTER = "SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_CLUSTER_NAME"
SAME = (NODE, CLUSTER, "SLURM_CONF")  # equal in every task of this node and cluster
NEEDED = (JOB, NODE, CLUSTER, "SLURM_PROCID")
DAEMONS = {"slurmd", "slurmstepd"}
SHARED_MEMORY = Path("/dev/shm")
# torch's (torch_PID_...) and NCCL's segments, which a process keeps mapped. Other programs may close and reopen theirs.
KNOWN_SEGMENTS = re.compile(r"torch_(?P<pid>\d+)_\d+_\d+|nccl-\w+")
MOST_JOBS = 5  # whose state is queried; the ranks wait for the replies
GB = 2**30


@dataclass(frozen=True)
class Task:
    """A process that was started as a task of a job step on this node.

    jobs: all job ids in its environment and its control group.
    """

    pid: int
    name: str
    jobs: frozenset[str]


def find(env: Mapping[str, str], timeout_s: float) -> tuple[tuple[Leftover, ...], OldFiles | None]:
    """Return the processes and files that ended jobs have left on this node.

    timeout_s: the time limit for all Slurm commands together.
    """
    if not all(env.get(name) for name in NEEDED) or not from_environment(env).uses_slurm:
        return (), None
    return tuple(_processes(env, timeout_s)), _files(_old_segments(float(env.get(ENV_ALLOCATED) or 0)))


def _processes(env: Mapping[str, str], timeout_s: float) -> Iterator[Leftover]:
    tasks = list(_tasks(env))
    jobs = sorted(frozenset[str]().union(*(task.jobs for task in tasks)))[:MOST_JOBS]
    until = time.monotonic() + timeout_s
    try:
        ended = {job: queue.has_ended(job, timedelta(seconds=max(until - time.monotonic(), 0.0) / 2)) for job in jobs}
    except slurm_client.Unreachable:
        ended = {}
    for task in tasks:
        answers = {ended.get(job, False) for job in task.jobs}
        if False not in answers and _task(task.pid, env) == task:
            yield Leftover(task.pid, task.name, tuple(sorted(task.jobs, key=int)), known=answers == {True})


def _tasks(env: Mapping[str, str]) -> Iterator[Task]:
    """Yield this user's tasks on this node that belong to other jobs."""
    own = _jobs(env)
    for pid in _pids():
        task = _task(pid, env)
        if task and not task.jobs & own:
            yield task


def _jobs(env: Mapping[str, str], cgroup: str = "") -> frozenset[str]:
    """Return the job ids in the environment `env` and in the control group `cgroup`.

    A heterogeneous job has an id for the job and an id for each component.
    """
    found = {text for name, text in env.items() if name == JOB or name.startswith("SLURM_JOB_ID_HET_GROUP_")}
    found.update(re.findall(r"/job_(\d+)", cgroup))
    return frozenset(text for text in found if text.isdigit())


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _task(pid: int, env: Mapping[str, str]) -> Task | None:
    """Return the process if it is a task of this user, on this node of this cluster. Otherwise return None.

    The network namespace identifies the node, because nodes that are containers on one machine share /proc.
    """
    place = Path(f"/proc/{pid}")
    try:
        if place.stat().st_uid != os.geteuid():
            return None
        text = (place / "environ").read_bytes()
        if b"SLURM_PROCID=" not in text or (place / "ns/net").readlink() != Path("/proc/self/ns/net").readlink():
            return None
        found = dict(line.split("=", 1) for line in text.decode(errors="replace").split("\0") if "=" in line)
        name = (place / "comm").read_text(errors="replace").strip()
        jobs = _jobs(found, (place / "cgroup").read_text(errors="replace"))
    except OSError:  # it has ended, or is not readable
        return None
    if name in DAEMONS or not from_environment(found).uses_slurm or any(found.get(key) != env.get(key) for key in SAME):
        return None
    return Task(pid, name, jobs) if found.get(JOB) and jobs else None


def _old_segments(before: float) -> list[Path]:
    """Return this user's files in /dev/shm that torch or NCCL created before the time `before`.

    Skip files whose name contains the process id of a running process, because that process may need them.
    """
    found = []
    with suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            with suppress(OSError):
                about, known = path.lstat(), KNOWN_SEGMENTS.fullmatch(path.name)
                if about.st_uid != os.geteuid() or about.st_mtime >= before or not known:
                    continue
                if not (known["pid"] and Path(f"/proc/{known['pid']}").exists()):
                    found.append(path)
    return found


def _files(files: Sequence[Path]) -> OldFiles | None:
    """Return the files that no process of this user uses, or None if there are none."""
    used = _shared_memory_in_use() if files else set()
    left, size = [path for path in files if str(path) not in used], 0
    for path in left:
        with suppress(OSError):
            size += path.stat().st_blocks * 512
    return OldFiles(str(left[0]), len(left), size / GB) if left else None


def _shared_memory_in_use() -> set[str]:
    """Return the files in /dev/shm that are open or mapped in a process of this user."""
    used: set[str] = set()
    for pid in _pids():
        place = Path(f"/proc/{pid}")
        try:
            if place.stat().st_uid != os.geteuid():
                continue
            maps = (place / "maps").read_text(errors="replace")
            used.update(line[line.index("/dev/shm/") :] for line in maps.splitlines() if "/dev/shm/" in line)
            for link in (place / "fd").iterdir():
                with suppress(OSError):
                    used.add(str(link.readlink()))
        except OSError:  # it has ended, or it has more privileges than this process, as init has, and no job started it
            continue
    return used
