"""Which processes are ours, and how they are ended.

Every node mounts its own /dev/shm, and the source of that mount carries the cluster's and the node's name:
'minislurm.<cluster>.<node>' in /proc/<pid>/mountinfo. Whatever runs in the node inherits the mount, so this
finds the daemons, the steps and what users started, also after the process that made the cluster was killed;
a process identifier that was given to somebody else in the meantime does not carry it.
"""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from tests.minislurm.errors import MiniSlurmError


def mark(cluster: str, node: str) -> str:
    return f"minislurm.{cluster}.{node}"


def node_of(pid: int, cluster: str) -> str | None:
    """The node of this cluster in which the process runs; None for every other process."""
    start = " - tmpfs " + mark(cluster, "")
    try:
        mounts = Path(f"/proc/{pid}/mountinfo").read_text(errors="replace")
    except OSError:
        return None  # gone, or a zombie: reading the mounts of a zombie is an error
    for line in mounts.splitlines():
        _, found, rest = line.partition(start)
        if found:
            return rest.split(" ", 1)[0]
    return None


def members(cluster: str) -> dict[int, str]:
    """Process identifier and node of everything that runs in the cluster."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    nodes = {pid: node_of(pid, cluster) for pid in pids}
    return {pid: node for pid, node in nodes.items() if node is not None}


def command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """In clock ticks since boot; with the identifier it names a process once and for all."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22, counted from the state, which is field 3


def send(pid: int, number: signal.Signals, cluster: str) -> None:
    """Signals the process if it still is one of ours: the descriptor pins it while we look."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if node_of(pid, cluster) is not None:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def kill(pids: Iterable[int], cluster: str) -> None:
    # Slurm's daemons first: a slurmstepd that sees its task die would still report it to the controller.
    for pid in sorted(pids, key=lambda pid: not command_name(pid).startswith("slurm")):
        send(pid, signal.SIGKILL, cluster)


def kill_all(cluster: str, *, spare: Iterable[int] = (), node: str | None = None, timeout_s: float = 60) -> None:
    """Ends what runs in the cluster, or in one node of it, and waits until it is gone."""
    spared, deadline = set(spare), time.monotonic() + timeout_s
    while True:
        left = [pid for pid, where in members(cluster).items() if pid not in spared and node in (None, where)]
        if not left:
            return
        if time.monotonic() > deadline:
            told = ", ".join(f"{pid} ({command_name(pid)})" for pid in left)
            raise MiniSlurmError(f"cluster {cluster!r}: alive {timeout_s:g} s after SIGKILL: {told}")
        kill(left, cluster)
        time.sleep(0.02)
