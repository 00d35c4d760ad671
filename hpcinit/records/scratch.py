"""A private folder on this node's disk, which is removed when the last process of the job ends.

Slurm does not clean /tmp after a job. Every process that uses such a folder has a shared lock on a file in it, which
the kernel releases even if the process is killed. The last process of a job removes the folder. If a job was killed,
the next start on the node removes its folder. Compiled kernels are in a different folder, which stays.

TMPDIR may be on a disk that several nodes share, and a node often cannot see another node's locks there. So a node
removes only folders whose names end with its own host name.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

LOCK = "in-use"
GONE = ".gone"  # a folder gets this suffix before it is removed, so that no process can start to use it
TRIES = 100
KEPT, KEPT_S = "kernels", 14 * 24 * 3600.0  # kernels stay for two weeks without a job on the node
ENV_LOCAL_DISK = "HPCINIT_LOCAL_DISK"  # the local disk of the nodes, from the cluster file


def folder_name(job: str) -> str:
    """Return World.job, such as '43.0.1', as a file name. Characters that a file name should not contain become '-'."""
    return re.sub(r"[^\w.+-]", "-", job) or "job"


def base(env: Mapping[str, str], room: int = 0) -> Path | None:
    """Return this user's folder on the node's disk, in the first suitable place, or None if no place is suitable.

    The places are the site's local disk, TMPDIR, /tmp and /var/tmp. A file system that is mounted with noexec is not
    suitable, because compiled code is loaded from the folder. A folder that another user owns or can enter is not
    suitable either, because that user's code could run as you.

    room: how many bytes must be free on the disk.
    """
    for parent in parents(env):
        folder = of_user(parent)
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


def parents(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders in which base() looks, in this order. If a variable is not set, its folder is ''."""
    return (env.get(ENV_LOCAL_DISK, ""), env.get("TMPDIR", ""), "/tmp", "/var/tmp")


def of_user(parent: str) -> Path:
    """Return the path of this user's own folder in `parent`."""
    return Path(parent) / f"hpcinit-{os.geteuid()}"


def in_use(folder: Path) -> bool:
    """Return whether a process is using the job's folder `folder`. If that cannot be determined, return True."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):  # the folder of kernels, or a folder that is not a job's
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


def take(parent: Path, job: str) -> Path:
    """Return the folder of `job` on this node. It exists until the last process that called take() for it ends.

    Raise OSError if the folder cannot be created.

    parent: the folder that base() returned.
    """
    # The folder's name contains the host name, because TMPDIR may be on a shared disk.
    folder = parent / f"{folder_name(job)}-{os.uname().nodename}"
    lock = _hold(folder)
    os.set_inheritable(lock, True)  # a command that this process executes keeps the lock
    atexit.register(_leave, folder, lock)
    return folder


def kept(parent: Path) -> Path:
    """Return the folder on this node for the compiled kernels of all this user's jobs.

    The folder stays after a job, so that a requeued job need not compile again. If no job has started on the node for
    KEPT_S seconds, sweep() removes it. Raise OSError if the folder cannot be created.

    parent: the folder that base() returned.
    """
    folder = parent / f"{KEPT}-{os.uname().nodename}"
    os.set_inheritable(_hold(folder), True)
    os.utime(folder)
    return folder


def _hold(folder: Path) -> int:
    """Create `folder` if needed, lock a file in it, and return the descriptor of the lock.

    Raise OSError if the folder cannot be created, or if other processes remove it again at each try.
    """
    for _ in range(TRIES):
        # Both errors occur if the last other process removes the folder at the same time.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(OSError):  # a disk without locks: folders are never removed there
                fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_still(folder / LOCK, lock):
                return lock
            os.close(lock)
    raise OSError(f"cannot create {folder}: it is not a folder, or other processes removed it {TRIES} times")


def sweep(parent: Path, *, kernels: bool = False) -> None:
    """Remove the folders that killed jobs left on this host, and old compiled kernels, if no process uses them.

    kernels: whether to also remove recent compiled kernels.
    """
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            if folder.name.endswith(GONE):
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.name.endswith(f"-{os.uname().nodename}"):
                new = folder.name.startswith(f"{KEPT}-") and time.time() - folder.stat().st_mtime <= KEPT_S
                if kernels or not new:
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
    with contextlib.suppress(OSError):  # the folder is in use, has no lock (keep it), or is removed already
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
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
