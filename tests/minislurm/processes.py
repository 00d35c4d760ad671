"""Find and end the processes of a cluster.

Every node mounts its own /dev/shm, whose source in /proc/<pid>/mountinfo is 'minislurm.<cluster>.<node>'. All processes
of the node inherit the mount: daemons, steps and users' processes. So they can be found after the process that made the
cluster was killed, and a pid that another process got in the meantime is not confused with them.
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
    """Return the node of this cluster that the process runs in; None for other processes."""
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
    """Return pid and node of every process of the cluster."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    nodes = {pid: node_of(pid, cluster) for pid in pids}
    return {pid: node for pid, node in nodes.items() if node is not None}


def command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """Return the start in clock ticks since boot; together with the pid it identifies a process uniquely."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22, counted from the state, which is field 3


def send(pid: int, number: signal.Signals, cluster: str) -> None:
    """Send the signal if the process still belongs to the cluster. The descriptor keeps the pid from being reused."""
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
    # Slurm's daemons are killed first, so that no slurmstepd reports the end of its task to the controller.
    for pid in sorted(pids, key=lambda pid: not command_name(pid).startswith("slurm")):
        send(pid, signal.SIGKILL, cluster)


def kill_all(cluster: str, *, spare: Iterable[int] = (), node: str | None = None, timeout_s: float = 60) -> None:
    """Kill all processes of the cluster, or of one of its nodes, and wait for their end."""
    spared, deadline = set(spare), time.monotonic() + timeout_s
    while True:
        left = [pid for pid, where in members(cluster).items() if pid not in spared and node in (None, where)]
        if not left:
            return
        if time.monotonic() > deadline:
            alive = ", ".join(f"{pid} ({command_name(pid)})" for pid in left)
            raise MiniSlurmError(f"cluster {cluster!r}: alive {timeout_s:g} s after SIGKILL: {alive}")
        kill(left, cluster)
        time.sleep(0.02)
