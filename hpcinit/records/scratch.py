"""A private folder on this node's own disk, for as long as a process of the job lives.

Slurm leaves /tmp as the job left it. So every process that uses a folder holds a shared lock in it, which the kernel
drops however the process ends; the last one out removes the folder, and the next start on the node removes what the
killed have left.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

LOCK = "in-use"
GONE = ".gone"  # a folder that is being removed has left its name, so that nobody can begin to use it
TRIES = 100
ENV_LOCAL_DISK = "HPCINIT_LOCAL_DISK"  # what the cluster's description says of the node's own disk


def folder_name(job: str) -> str:
    """'43.0.1' for World.job; what a file name should not hold becomes '-'."""
    return re.sub(r"[^\w.+-]", "-", job) or "job"


def base(env: Mapping[str, str], room: int = 0) -> Path | None:
    """This user's folder below the site's local disk, TMPDIR, /tmp or /var/tmp. room: bytes that must be free there.

    The first of them that is ours alone and may hold programs. Compiled extensions are loaded from it, so a mount with
    noexec will not do; and what another user can write there would run as this one, so neither will a folder that
    somebody else has made or can enter.
    """
    for parent in (env.get(ENV_LOCAL_DISK, ""), env.get("TMPDIR", ""), "/tmp", "/var/tmp"):
        folder = Path(parent) / f"hpcinit-{os.geteuid()}"
        with contextlib.suppress(OSError):
            if not folder.is_absolute():
                continue
            disk = os.statvfs(parent)
            if disk.f_flag & os.ST_NOEXEC or disk.f_bavail * disk.f_frsize < room:
                continue
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return folder
    return None


def take(parent: Path, job: str) -> Path:
    """The folder of `job` on this node, below base(), until the last process that took it ends. Raises OSError."""
    # With the host's name: TMPDIR may be on a shared disk.
    folder = parent / f"{folder_name(job)}-{os.uname().nodename}"
    lock = _hold(folder)
    os.set_inheritable(lock, True)  # a command that takes this process's place goes on using it
    atexit.register(_leave, folder, lock)
    return folder


def _hold(folder: Path) -> int:
    """The descriptor of a shared lock in `folder`, which is made where it is not there. Raises OSError."""
    for _ in range(TRIES):
        # Either may come of a folder that is removed under our hands, by one that was the last.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(OSError):  # a disk without locks: nobody removes anything then
                fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_still(folder / LOCK, lock):
                return lock
            os.close(lock)
    raise OSError(f"{folder} is no folder, or was removed {TRIES} times while it was made")


def sweep(parent: Path) -> None:
    """Remove the folders that nobody uses any more: those of jobs that were killed."""
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            if folder.name.endswith(GONE):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                _remove_unused(folder)


def _is_still(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def _leave(folder: Path, lock: int) -> None:
    os.close(lock)
    _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    with contextlib.suppress(OSError):  # in use, without a lock (not ours to judge), or gone already
        lock = os.open(folder / LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(folder / LOCK, lock):
                _remove(folder)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        gone = folder.with_name(f".{folder.name}.{os.getpid()}{GONE}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
