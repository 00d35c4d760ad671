"""Starts a daemon inside a node, and waits for things with a limit.

The limits are far above what a quiet machine takes: other workers and eight ranks may share its two cores.
"""

import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.minislurm.errors import MiniSlurmError, quoted
from tests.minislurm.processes import node_of
from tests.minislurm.shell import PATH


def entered(pid: int, command: Sequence[str]) -> list[str]:
    """The command as it is run inside the node that `pid` holds."""
    # Not `ip netns exec`: that remounts /sys, where slurmd then finds no cgroup file system and stops.
    # --root: under chroot, entering a mount namespace would leave it.
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--mount", "--root", "--", *command]


def launch(pid: int, command: Sequence[str], directory: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts a daemon in the node of `pid`; what it prints before it opens its log goes to <log>.out."""
    with log.with_suffix(".out").open("ab") as out:
        return subprocess.Popen(
            entered(pid, command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
            start_new_session=True, env={"PATH": PATH, "SLURM_CONF": f"{directory}/etc/slurm.conf"},
        )  # fmt: skip


def told(what: str, log: Path) -> str:
    """The message of a daemon that failed, with the end of all it wrote."""
    out = log.with_suffix(".out")
    files = [log, out] if out.exists() and out.stat().st_size else [log]
    return "\n".join([what, *map(quoted, files)])


def wait_started(daemon: subprocess.Popen[bytes], what: str, log: Path, timeout_s: float = 120) -> None:
    """Waits until a daemon has gone to the background, which they do when their configuration is read."""
    try:
        status = daemon.wait(timeout_s)
    except subprocess.TimeoutExpired as expired:
        daemon.kill()
        daemon.wait()
        raise MiniSlurmError(told(f"{what} did not go to the background within {timeout_s:g} s", log)) from expired
    if status:
        raise MiniSlurmError(told(f"{what} did not start: exit status {status}", log))


def until(holds: Callable[[], bool], complaint: Callable[[], str], timeout_s: float = 120) -> None:
    """Waits for `holds`; the complaint is asked for only when it is needed."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.01
    while not holds():
        if time.monotonic() > deadline:
            raise MiniSlurmError(f"{complaint()}\n(waited {timeout_s:g} s)")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.25)


def listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def daemon_pid(pid_file: Path, cluster: str) -> int | None:
    """The identifier in a daemon's file, if that process still is one of ours."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return None
    return pid if node_of(pid, cluster) is not None else None
