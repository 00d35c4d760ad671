"""Writes files atomically, and checks who else can write a file or folder that hpcinit executes or trusts.

Also reads files that may be missing, and finds the type of a file system.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Container
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from hpcinit.base.quoting import shell


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a temporary file in the same folder, 'x.json.4242.tmp', and rename it. On OSError, `path` is unchanged.

    mode: of a new file, before the umask.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_or_empty(path: Path) -> str:
    """Return the text of the file without surrounding space, or '' if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def file_system(path: Path) -> str:
    """Return the type of the file system that contains `path` (ext4, nfs4, lustre, ...), or '' if unknown."""
    best, kind = -1, ""
    with suppress(OSError):
        here = path.resolve()
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            # "36 35 98:0 /root /mount\040point rw,noatime master:1 - ext3 /dev/root rw"
            mount, _, rest = line.partition(" - ")
            point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
            if here.is_relative_to(point) and len(point) >= best:
                best, kind = len(point), rest.split()[0]
    return kind


# The reasons for these rules: docs/decisions/0038-file-ownership-checks.md.

ACL = "system.posix_acl_access"  # extended attribute; a POSIX ACL may grant access to more users
FOLDER_MODE = 0o755  # before the umask: others may enter the folders that we create


def ownership_problem(
    path: Path, found: os.stat_result, advice: str, *, owners: Container[int] = (), named: bool = False
) -> str:
    """Return why `path` cannot be trusted, with what to type, or '' if it can.

    found: os.stat of the open file if a race matters, else of the path. advice: what to do about another owner. owners:
    user ids that are trusted besides this user and root. named: the user named this path, so its group is trusted.
    """
    mode = stat.S_IMODE(found.st_mode)

    def about() -> str:  # called only for an error, because looking up names may query a server
        return f"{path} belongs to {user(found.st_uid)} (mode {mode:04o})"

    if found.st_uid not in (0, os.geteuid()) and found.st_uid not in owners:
        return f"{about()}, expected {user(os.geteuid())} or root: its owner could run any program as you; {advice}"
    folder = stat.S_ISDIR(found.st_mode)
    if folder and mode & stat.S_ISVTX:  # as in /tmp, users cannot rename or remove files of other users
        return ""
    if mode & stat.S_IWOTH:
        who, change = "every user", "go-w" if mode & stat.S_IWGRP else "o-w"
    elif mode & stat.S_IWGRP and not named and not _only_ours(path, found.st_gid):
        who, change = f"group {_group(found.st_gid)}", "g-w"
    else:
        return ""
    shared = f", or chmod +t {shell(str(path))} if others need to create files there" if folder else ""
    return (
        f"{about()} and {who} can write it, and so could run any program as you; "
        f"chmod {change} {shell(str(path))}{shared}"
    )


def path_ownership_problems(path: Path, advice: str, *, owners: Container[int] = (), named: bool = False) -> str:
    """Return ownership_problem() of a path that is not open. Raise OSError if it does not exist."""
    return ownership_problem(path, path.stat(), advice, owners=owners, named=named)


def runs_dir_ownership_problems(path: Path) -> str:
    """Return why another user could replace a run folder in `path`, or ''. Raise OSError if it does not exist."""
    name = user(os.geteuid()).rpartition(" ")[2]  # '4242' for a user without a name
    return path_ownership_problems(path, f"choose your own folder: runs_dir={shell(str(path / name))}")


def make_folders(path: Path) -> None:
    """Create `path` and its parents, writable only by this user with any umask. Raise OSError."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)


def user(number: int) -> str:
    """Return the name of a user id, or 'user 4242' if it has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _only_ours(path: Path, group: int) -> bool:
    """Return whether this user is the only one in the group: with umask 002 each user has a group of the same name."""
    if not _private(group):
        return False
    try:
        return ACL not in os.listxattr(path)
    except OSError:  # a file system without ACLs
        return True


@cache
def _private(group: int) -> bool:
    try:
        me, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return me.pw_gid == group and members.gr_name == me.pw_name and set(members.gr_mem) <= {me.pw_name}
