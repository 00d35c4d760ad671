"""Sets limits, lifetime and title of this process, and reads what /proc shows about any process."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcinit.base.console import say
from hpcinit.base.safe_files import read_or_empty

# prctl(2)
PR_SET_PDEATHSIG = 1  # the signal that this process gets when its parent dies
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36  # processes whose parent has died become children of this process
SHORT = 15  # bytes of a process's short name, which top and `ps -o comm` show
GENERATIONS = 64  # the most processes that command_lines() reads
PROC = Path("/proc")
# Loaded here, because a preexec_fn should import nothing.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when its parent dies. If the parent has already died, exit now.

    parent: the parent's process id.
    number: the signal. SIGTERM may end the process too late: a shell with a trap first waits for its command, and a
        rank first tries to save.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before prctl, which then sends nothing
        os._exit(128 + number)


def adopt_orphans() -> None:
    """Make this process the new parent of each descendant whose parent dies.

    Child processes do not inherit this setting.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


ENV_PARENT = "HPCINIT_PARENT"  # process id of an agent, in the environment of its ranks


def die_with_agent() -> None:
    """Make the kernel send SIGKILL to this process when the agent that started it dies.

    SIGTERM is not enough: a rank that uses run.should_stop() would try to save, and wait forever for its peers.

    ENV_PARENT contains the agent's process id. It is removed from the environment, because it is wrong for the
    children of this process.
    """
    parent = os.environ.pop(ENV_PARENT, "")
    if parent.isdigit():
        die_with_parent(int(parent))


# How many files (RLIMIT_NOFILE) a rank may open per other rank. In each of its groups, gloo connects to every other
# rank. A run has the default group, up to five groups of its mesh, and those of should_stop() and save(). Rank 0 also
# has the connections of the rendezvous and of torch's store.
PER_RANK = 10
BESIDES = 1024  # for the program's own files; this is the usual soft limit


def raise_open_files_limit(ranks: int) -> None:
    """Raise this process's soft limit of open files to what a job of `ranks` ranks needs, but not above the hard limit.

    Child processes inherit the limit. Errors are ignored: if the limit stays too low, a later connection fails with its
    own error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = PER_RANK * ranks + BESIDES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    with contextlib.suppress(ValueError, OSError):
        most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextlib.contextmanager
def watchdog(seconds: float, about: Callable[[], str]) -> Iterator[None]:
    """Limit the time of the `with` block. After `seconds`, print a message and all stacks, and exit with status 1.

    about: a function that returns the message. It must not block for long.

    torch's own timeouts are not reliable: with a timeout of 5 s, a client connected to a silent server was still
    waiting after 200 s (torch 2.13).
    """

    def end() -> None:
        try:
            reason = about()
        except Exception as error:
            reason = f"the start-up timed out, and hpcinit cannot find out why: {error!r}"
        end_hard(reason, stacks=True)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_hard(reason: str, stacks: bool = False) -> None:
    """Print `reason` and exit at once with status 1.

    Exit handlers are skipped, because they could wait forever for ranks that are dead. The exit works even if the
    program has replaced or closed its streams.

    stacks: whether to print the stacks of all threads too.
    """
    try:
        with contextlib.suppress(Exception):
            say(f"error: {reason}")
        if stacks:
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback(file=2, all_threads=True)  # 2: the original stderr of the process
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    finally:
        os._exit(1)


def set_title(title: str) -> None:
    """Show `title` as the name and the command line of this process in ps and top.

    The title overwrites the command line in this process's memory (proc(5), stat: arg_start, arg_end). If it is longer
    than the command line, it is cut. No error is raised.
    """
    text = title.encode()
    # No space in the short name: Slurm 22.05 (proctrack/linuxproc) splits /proc/PID/stat at spaces, and would neither
    # signal nor kill a process named "(rank 0)".
    if _libc is not None:
        _libc.prctl(PR_SET_NAME, text.replace(b" ", b"-")[:SHORT])
    start, end = (int(field) for field in stat("self")[48 - 3 : 50 - 3] or (0, 0))
    if 0 < start < end:  # both are 0 if the kernel hides them
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def stat(pid: int | str, proc: Path = PROC) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one (the state) on, or [] if the process is gone."""
    # "4242 (name with ) and blanks) S 4241 ...": proc(5) numbers the fields from 1.
    return read_or_empty(proc / str(pid) / "stat").rpartition(")")[2].split()


@dataclass(frozen=True, kw_only=True)
class Process:
    """Identifies a process, so that another process can later find out whether it has ended.

    boot: the boot id of the kernel, or '' if it is unknown.
    namespace: the pid namespace, or '' if it is unknown.
    started: when the process started, in clock ticks since the boot, or '' if it is unknown.

    The process id alone is not enough: the kernel reuses ids. After a reboot, or in another pid namespace (container),
    another process can have the same id.
    """

    host: str
    pid: int
    boot: str = ""
    namespace: str = ""
    started: str = ""

    def has_ended(self) -> bool | None:
        """Return whether the process has ended, or None if this host cannot find out.

        It cannot if the process ran on another host or in another pid namespace, such as a container.

        If the kernel hides other users' processes (hidepid), call this only for a process of this user.
        """
        here = identity()
        if self.host != here["host"] or not (self.boot and here["boot"]):
            return None
        if self.boot != here["boot"]:
            return True
        if not (self.started and here["started"] and self.namespace) or self.namespace != here["namespace"]:
            return None
        return _started(self.pid) != self.started


def identity(pid: int | None = None) -> dict[str, Any]:
    """Return the fields of Process for this process, or for its child with the process id `pid`."""
    try:
        namespace = str((PROC / "self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return {
        "host": os.uname().nodename,
        "pid": pid or os.getpid(),
        "boot": read_or_empty(PROC / "sys/kernel/random/boot_id").strip(),
        "namespace": namespace,
        "started": _started(pid or os.getpid()),
    }


def _started(pid: int) -> str:
    """Return when the process started, in clock ticks since the boot. Return '' if it has ended or is a zombie."""
    fields = stat(pid)
    return fields[22 - 3] if fields and fields[0] not in "ZX" else ""


def state(pid: int) -> str:
    """Return the state of a process: 'R', 'S', 'D', 'T' (stopped by a signal), 'Z' ..., or '' if it is gone."""
    return next(iter(stat(pid)), "")


def children(pid: int) -> list[int]:
    """Return the process ids of the children of a single-threaded process, or [] if the kernel does not list them."""
    return [int(word) for word in read_or_empty(PROC / f"{pid}/task/{pid}/children").split()]


def command_lines(pid: int, proc: Path = PROC) -> Iterator[str]:
    """Yield the command line of process `pid`, then of its parent, and so on. The arguments are separated by NUL.

    Stop after GENERATIONS processes, or at the first one that is not visible.
    """
    for _ in range(GENERATIONS):
        yield read_or_empty(proc / str(pid) / "cmdline")
        fields = stat(pid, proc)
        if len(fields) < 2 or int(fields[1]) < 2:
            return
        pid = int(fields[1])


def stuck(pid: int) -> str:
    """Return the state of a process that survives SIGKILL, and the kernel function it is in.

    An example is 'D (in nfs_wait_bit_killable)'.
    """
    is_in, where = state(pid), read_or_empty(PROC / f"{pid}/wchan").strip("0")
    if not is_in:
        return "gone"
    return f"{is_in} (in {where})" if where else is_in
