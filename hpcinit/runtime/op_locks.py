"""Locks on a cache of compiled ops: torch's, which a killed compile leaves behind, and ours, which the kernel drops.

torch up to 2.13 (utils/file_baton.py) makes a file `lock` in the op's folder, keeps it open while it compiles, and
waits for as long as one is there: https://github.com/deepspeedai/DeepSpeed/issues/5205. From 2.14 on it locks that file
with flock(2): the kernel releases the lock of a process that ended, and the file stays after every build.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcinit.facts import versions
from hpcinit.facts.errors import BringUpError

TORCH_LOCK = "lock"
KERNEL_LOCKS = "2.14"  # torch/utils/cpp_extension.py of 2.14.1 uses FileLock, that of 2.13.0 FileBaton; 2.14.0 not seen
OUR_LOCK = ".hpcinit-build"  # its content says who builds what; empty when nobody does
WAIT_S = 1800.0
# Disks that one node alone writes to: whoever holds a lock there is a process of this node.
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


@dataclass(frozen=True)
class Judgement:
    """Of one lock of torch's. state: 'held', 'stale' (nobody will release it) or 'unknown'. age_s: since anything last
    changed in its folder.
    """

    path: Path
    state: str
    why: str
    age_s: float

    def __str__(self) -> str:
        return f"{self.path} ({self.age_s:.0f} s old): {self.why}"


def files_are_locks() -> bool:
    """Return whether the installed torch waits for as long as a lock's file is there."""
    return versions.key(versions.installed("torch") or "0") < versions.key(KERNEL_LOCKS)


def locks(root: Path) -> list[Judgement]:
    """Every lock of torch's below a cache, judged; none where the file of a lock does not make torch wait."""
    found: list[Judgement] = []
    if not files_are_locks():
        return found
    for path in sorted(root.glob(f"*/{TORCH_LOCK}")):
        with contextlib.suppress(FileNotFoundError):  # released meanwhile
            found.append(judge(path))
    return found


def judge(path: Path) -> Judgement:
    """Whether somebody will release this lock. Raises FileNotFoundError if that has happened."""
    owner = path.stat().st_uid
    newest = max(each.stat(follow_symlinks=False).st_mtime for each in (path, *path.parent.iterdir()))
    age = max(0.0, time.time() - newest)
    pid = holder(path)
    if pid:
        return Judgement(path, "held", f"process {pid} compiles", age)
    host = os.uname().nodename
    builder = read_builder(path.parent.parent)
    if builder and builder.op == path.parent.name and builder.host == host and not builder.alive():
        return Judgement(path, "stale", f"left by {builder}, which has ended", age)
    if owner != os.geteuid():
        return Judgement(path, "unknown", f"of user {owner}, whose processes cannot be looked into", age)
    kind = file_system(path)
    if kind in LOCAL:
        return Judgement(path, "stale", f"no process on {host} has it open, and no other node can ({kind})", age)
    return Judgement(path, "unknown", f"no process on {host} has it open; another node may ({kind or 'unknown'})", age)


def holder(path: Path) -> int:
    """The process of this user on this node that has the file open, 0 if none has. Raises FileNotFoundError."""
    while True:
        before = path.stat()
        found = _has_open(before)
        after = path.stat()
        # Another file of the same name is another holder's, who may have come after we looked at him.
        if found or (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):
            return found


def _has_open(wanted: os.stat_result) -> int:
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # ended, or somebody else's
            for entry in folder.iterdir():
                with contextlib.suppress(OSError):
                    if os.path.samestat(entry.stat(), wanted):
                        return int(folder.parent.name)
    return 0


def file_system(path: Path) -> str:
    """'ext4', 'nfs4', 'lustre'...: of the mount that a path is on, '' if that cannot be told."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            # "36 35 98:0 /root /mount\040point rw,noatime master:1 - ext3 /dev/root rw"
            mount, _, rest = line.partition(" - ")
            point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
            if path.resolve().is_relative_to(point) and len(point) >= best:
                best, kind = len(point), rest.split()[0]
    return kind


@dataclass(frozen=True)
class Builder:
    """Who builds an op. started: the process's start, in clock ticks since boot, which tells it from a later one."""

    host: str
    pid: int
    started: str
    op: str

    def alive(self) -> bool:
        """Asked on its own host."""
        return self.started == start_of(self.pid) != ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, building {self.op}"


def start_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        # "4242 (name with ) and blanks) S ...": the 22nd word, the 20th after the last bracket
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def read_builder(root: Path) -> Builder | None:
    """Who last began to build in a cache, and did not say that it had finished; None if nobody."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Builder(**json.loads((root / OUR_LOCK).read_text()))
    return None


@contextlib.contextmanager
def one_builder(root: Path, say: Callable[[str], None], wait_s: float = WAIT_S) -> Iterator[Callable[[str], None]]:
    """Be the only builder in a cache: all others wait here, until this one leaves or dies. Yields `building(op)`.

    Raises BringUpError after `wait_s` seconds, and OSError where the folder cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    fd = os.open(root / OUR_LOCK, os.O_RDWR | os.O_CREAT, 0o600)

    def building(op: str) -> None:
        me = Builder(os.uname().nodename, os.getpid(), start_of(os.getpid()), op)
        _write(fd, json.dumps(vars(me)))

    try:
        _wait(fd, root, say, wait_s)
        try:
            yield building
        finally:
            _write(fd, "")
    finally:
        os.close(fd)


def _wait(fd: int, root: Path, say: Callable[[str], None], wait_s: float) -> None:
    start = said = time.monotonic()
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            return say(f"{root} is on a disk without locks ({error.strerror}): going on without")
        now = time.monotonic()
        who = read_builder(root) or "a process that has not said what it builds"
        if now - start > wait_s:
            raise BringUpError(
                f"waited {wait_s:.0f} s for {who}, which holds {root / OUR_LOCK}: see whether it still compiles, "
                "end it, or set TORCH_EXTENSIONS_DIR to another folder"
            )
        if now - said > 10:
            said = now
            say(f"waiting for {who} in {root} ({now - start:.0f} s)")
        time.sleep(0.2)


def _write(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)
