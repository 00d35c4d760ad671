"""Start a daemon inside a node, and wait for conditions with a limit.

The limits are far longer than an idle machine needs, because other workers and eight ranks may share its two cores.
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
    """Return the command that runs `command` in the namespaces of `pid`."""
    # `ip netns exec` would remount /sys, and slurmd would stop because it finds no cgroup file system there.
    # --root keeps a chroot, which entering a mount namespace would leave.
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--mount", "--root", "--", *command]


def launch(pid: int, command: Sequence[str], directory: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a daemon in the node of `pid`. Its output before it opens its log is written to <log>.out."""
    with log.with_suffix(".out").open("ab") as out:
        return subprocess.Popen(
            entered(pid, command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
            start_new_session=True, env={"PATH": PATH, "SLURM_CONF": f"{directory}/etc/slurm.conf"},
        )  # fmt: skip


def with_log(what: str, log: Path) -> str:
    """Return the message `what` with the end of the daemon's log and output."""
    out = log.with_suffix(".out")
    files = [log, out] if out.exists() and out.stat().st_size else [log]
    return "\n".join([what, *map(quoted, files)])


def wait_started(daemon: subprocess.Popen[bytes], what: str, log: Path, timeout_s: float = 120) -> None:
    """Wait until a daemon is in the background: it has then read its configuration."""
    try:
        status = daemon.wait(timeout_s)
    except subprocess.TimeoutExpired as expired:
        daemon.kill()
        daemon.wait()
        raise MiniSlurmError(with_log(f"{what} did not go to the background within {timeout_s:g} s", log)) from expired
    if status:
        raise MiniSlurmError(with_log(f"{what} did not start: exit status {status}", log))


def until(holds: Callable[[], bool], complaint: Callable[[], str], timeout_s: float = 120) -> None:
    """Wait for `holds`. Raise MiniSlurmError with `complaint()` after `timeout_s`."""
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
    """Return the pid in a daemon's file, if that process still belongs to the cluster."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return None
    return pid if node_of(pid, cluster) is not None else None
