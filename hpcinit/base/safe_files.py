"""Atomic writes, and the check of who may write a file or folder that hpcinit runs or reads."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Container
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from hpcinit.base.quoting import shell


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Through a file beside it that takes its place, 'x.json.4242.tmp'. Raises OSError; then `path` is as it was.

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


# Whether another user could have written what hpcinit is about to execute or trust, and what to do about it.
#
# Why these rules: docs/decisions/0038-who-may-write-what-we-run.md.

ACL = "system.posix_acl_access"  # extended attribute; a POSIX ACL may name further users
FOLDER_MODE = 0o755  # before the umask, of a folder that we create and others may enter


def ownership_problem(
    path: Path, found: os.stat_result, advice: str, *, owners: Container[int] = (), named: bool = False
) -> str:
    """Return why `path` cannot be trusted, with what to type, or '' if it can.

    found: of the open file where a race matters, else of the path. advice: what to do about a foreign owner. owners:
    user ids that are trusted besides this user and root. named: the user chose this place for what its group writes.
    """
    mode = stat.S_IMODE(found.st_mode)

    def about() -> str:  # looks up names, which may ask a server: only where something is wrong
        return f"{path} belongs to {user(found.st_uid)} (mode {mode:04o})"

    if found.st_uid not in (0, os.geteuid()) and found.st_uid not in owners:
        return f"{about()}, expected {user(os.geteuid())} or root: its owner could run any program as you; {advice}"
    folder = stat.S_ISDIR(found.st_mode)
    if folder and mode & stat.S_ISVTX:  # as in /tmp, nobody can rename or remove what belongs to another user
        return ""
    if mode & stat.S_IWOTH:
        who, change = "every user", "go-w" if mode & stat.S_IWGRP else "o-w"
    elif mode & stat.S_IWGRP and not named and not _only_ours(path, found.st_gid):
        who, change = f"group {_group(found.st_gid)}", "g-w"
    else:
        return ""
    shared = f", or chmod +t {shell(str(path))} if others need to create files there" if folder else ""
    return (
        f"{about()} and {who} can write it: whoever can could run any program as you; "
        f"chmod {change} {shell(str(path))}{shared}"
    )


def path_ownership_problems(path: Path, advice: str, *, owners: Container[int] = (), named: bool = False) -> str:
    """Return problem() of a path that is not open. Raise OSError if it does not exist."""
    return ownership_problem(path, path.stat(), advice, owners=owners, named=named)


def runs_dir_ownership_problems(path: Path) -> str:
    """Return why another user could replace a run folder in `path`, or ''. Raise OSError if it does not exist."""
    name = user(os.geteuid()).rpartition(" ")[2]  # '4242' of a user without a name
    return path_ownership_problems(path, f"choose a folder of your own: runs_dir={shell(str(path / name))}")


def make_folders(path: Path) -> None:
    """Create `path` and the folders above it, which only this user can write, whatever the umask. Raise OSError."""
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
    """Whether nobody else is in a group that may write: with umask 002 each user has a group of the same name."""
    if not _private(group):
        return False
    try:
        return ACL not in os.listxattr(path)
    except OSError:  # a file system without them
        return True


@cache
def _private(group: int) -> bool:
    try:
        me, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return me.pw_gid == group and members.gr_name == me.pw_name and set(members.gr_mem) <= {me.pw_name}
