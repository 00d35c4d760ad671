"""Folders that a submission and its job write to: there, writable, with room, on a file server whose clock is right."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcinit.config.schema import Config
from hpcinit.facts import bad_nodes, clocks
from hpcinit.facts.checkup import BAD, OK, WARNING, Check
from hpcinit.facts.user_paths import expanded, home

LITTLE_GB, FEW_FILES = 1.0, 1000  # below this a warning
OF_ONE_MACHINE = ("tmpfs", "ramfs", "overlay", "squashfs")  # file systems that no compute node shares
# Where libraries keep what they download or compile, and their default below the home folder.
CACHES = {"HF_HOME": ".cache/huggingface", "TORCH_HOME": ".cache/torch"}
ROOM = "free some space, or choose another"


def checks(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    yield from _runs_dir(config)
    for key, place in (("cluster.scratch", config.cluster.scratch), ("cluster.cache", config.cluster.cache)):
        if place:
            yield _folder(key, expanded(os.path.expandvars(place)), absent=WARNING)
    if home() == Path(os.devnull):
        said = f"there is none: HOME is not set, and uid {os.getuid()} has no entry in /etc/passwd"
        yield Check("home folder", BAD, said, "export HOME=... with a folder of yours")
        return
    if not config.cluster.cache:
        for name, below in CACHES.items():
            yield _folder(name, Path(env.get(name) or home() / below), absent=OK)
    yield _folder("what is known of bad nodes", bad_nodes.folder(env), absent=OK)


def _runs_dir(config: Config) -> Iterator[Check]:
    path = expanded(config.runs_dir).absolute()
    found = _folder("runs_dir", path, absent=OK)
    kind = _file_system(_there(path))
    if found.grade == OK and config.cluster.engine == "slurm" and kind in OF_ONE_MACHINE:
        do = "runs_dir=... on a file system that all nodes share"
        found = Check("runs_dir", WARNING, f"{found.said}; {kind}, which other machines do not see", do)
    yield found
    if found.grade == BAD:
        return
    before, at, after = _touched(_there(path))
    clock = clocks.skew(before, after, at)
    do = "have the clocks synchronised (chronyd): times in run folders are the file server's" * (clock.grade != OK)
    yield Check("file server's clock", clock.grade, str(clock), do)


def _folder(about: str, path: Path, absent: str) -> Check:
    """absent: the grade of a folder that is not there and could be made, or lies on the nodes only."""
    there = _there(path)
    if there != path and absent != OK:
        return Check(about, absent, f"{path} is not here", "nothing, if it is on the compute nodes only")
    try:
        _touched(there)
        disk = os.statvfs(there)
    except OSError as error:
        do = f"{about}=... elsewhere" if "." in about or about == "runs_dir" else f"set {about} to a folder of yours"
        if about not in ("runs_dir", *CACHES) and "." not in about:
            do = "set XDG_STATE_HOME to a folder of yours"
        return Check(about, BAD, f"cannot write in {there}: {error.strerror}", do)
    free_gb, files = disk.f_bavail * disk.f_frsize / 2**30, disk.f_favail
    said = f"{path}{' can be made' if there != path else ''}, {free_gb:.1f} GB free"
    if disk.f_blocks and free_gb < LITTLE_GB:
        return Check(about, WARNING, said, ROOM)
    if disk.f_files and files < FEW_FILES:
        return Check(about, WARNING, f"{said}, and room for {files} more files", ROOM)
    return Check(about, OK, said)


def _there(path: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    return next((place for place in (path, *path.parents) if place.exists()), path)


def _touched(folder: Path) -> tuple[float, float, float]:
    """A file is written and removed: this machine's clock before, the file's, and this machine's after. Raises OSError.

    With content: a file that is only made may get its time from here, where one that is written has the server's.
    """
    before = time.time()
    descriptor, name = tempfile.mkstemp(prefix=".hpcinit-", dir=folder)
    try:
        os.write(descriptor, b"hpcinit doctor was here\n")
        os.fsync(descriptor)
        at = os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        os.unlink(name)  # noqa: PTH108
    # A kernel's files have the time of its last tick, up to 10 ms before (CONFIG_HZ=100).
    return before - 0.01, at, time.time()


def _file_system(path: Path) -> str:
    """'nfs4', 'lustre', 'tmpfs': of the mount that holds `path`; '' where Linux does not say."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for words in (line.split() for line in mounts):
        point = words[1].replace("\\040", " ")
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best):
            best, kind = point, words[2]
    return kind
