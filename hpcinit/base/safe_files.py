"""Writes files atomically, and checks who else can write to the files and folders that hpcinit executes or trusts.

It also reads files that may be missing, and finds the type of a file system.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import re
import stat
from collections.abc import Container
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from hpcinit.base.quoting import shell

_PART = 65536


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file so that readers see either the old content or the complete new content.

    The content is first written to a temporary file in the same folder, such as 'x.json.4242.tmp'. That file is then
    renamed. If this raises OSError, `path` is unchanged.

    mode: the permissions of a new file, before the umask.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def append(path: Path, text: str) -> None:
    """Append `text` to a file in one write, so that several processes can append to it. Raise OSError if that fails.

    A new file is readable only by this user. A link is refused.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def read_or_empty(path: Path) -> str:
    """Return the text of the file without surrounding whitespace, or '' if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# Reading files of run folders. Several users may write into one runs_dir. Another user's FIFO would block the reader
# forever, a link to /dev/zero has no end, and 200,000 brackets exhaust the JSON parser's stack.

LARGEST = 2**28  # bytes of a file that is read as a whole; a submission.json of 1,000 tasks has 200 kB


def descriptor_of(path: str | Path) -> int:
    """Open a regular file for reading and return its descriptor. Raise OSError if that fails or is unsafe.

    The file must belong to this user, to root, or to the owner of its folder. So call this for another user's folder
    only if this user named the folder on the command line.

    Links are refused, except a link to the file of the same name in the parent folder. submit creates such links for
    the components of a heterogeneous job.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        above, name = os.path.split(path)
        if error.errno != errno.ELOOP or str(Path(path).readlink()) != f"../{name}":
            raise
        path = Path(above).absolute().parent / name
        descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_uid not in (os.geteuid(), 0) and found.st_uid != Path(path).parent.stat().st_uid:
            raise OSError(errno.EPERM, f"belongs to {user(found.st_uid)}, not to the owner of its folder", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: str | Path) -> BinaryIO:
    """Open a file of any size for reading. Raise OSError if that fails or descriptor_of() refuses the file."""
    return os.fdopen(descriptor_of(path), "rb")


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file.

    Raise OSError if the file can't be read, is larger than LARGEST bytes, or descriptor_of() refuses it. No file object
    is used: it would need twice as many system calls, and some commands read a thousand runs.
    """
    descriptor = descriptor_of(path)
    try:
        content = part = os.read(descriptor, _PART)
        while len(part) == _PART:  # a shorter part is the end of the file
            content += (part := os.read(descriptor, _PART))
            if len(content) > LARGEST:
                raise OSError(errno.EFBIG, f"larger than {LARGEST >> 20} MiB", str(path))
        return content
    finally:
        os.close(descriptor)


def read_text(path: str | Path) -> str:
    """Return the text of a file. Bytes that are not UTF-8 are replaced.

    Raise OSError as read_bytes() does.
    """
    return read_bytes(path).decode(errors="replace")


def read_json(path: str | Path) -> Any:
    """Return the parsed content of a JSON file.

    Raise OSError as read_bytes() does, and ValueError if the file is not JSON.
    """
    try:
        return json.loads(read_bytes(path))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_or_empty(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in the file, or {} if the file is missing, unreadable or not a JSON object."""
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def is_own(path: str | Path, *, folder: bool = False) -> bool:
    """Return whether this user owns the file or folder. Return False if it does not exist.

    folder: whether it must be a real folder, not a link to a folder.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and (not folder or stat.S_ISDIR(found.st_mode))


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
    """Return why `path` cannot be trusted and what to type, or '' if it can be trusted.

    found: the result of os.stat(), or of os.fstat() for an open file.
    advice: what to do if another user owns it.
    owners: user ids that are trusted in addition to this user and root.
    named: whether the user typed this path; then its group is trusted too.
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
        f"{about()} and {who} can write to it, so they could run any program as you; "
        f"chmod {change} {shell(str(path))}{shared}"
    )


def path_ownership_problems(path: Path, advice: str, *, owners: Container[int] = (), named: bool = False) -> str:
    """Return the result of ownership_problem() for a path that is not open. Raise OSError if it does not exist."""
    return ownership_problem(path, path.stat(), advice, owners=owners, named=named)


def pickle_problem(path: Path) -> str:
    """Return why the pickle file `path` must not be loaded, or '' if loading it is safe.

    Loading a pickle runs any code that its author put in it. A missing pickle is not a problem. Raise OSError if its
    folder does not exist.
    """
    if problem := path_ownership_problems(path.parent, "submit again"):
        return problem
    if not path.exists() or (is_own(path) and is_own(path.resolve())):
        return ""
    return f"{path} belongs to {user(path.lstat().st_uid)}, expected {user(os.geteuid())}, so it is not loaded"


def runs_dir_ownership_problems(path: Path) -> str:
    """Return how another user could replace a run folder in `path`, or '' if no other user can.

    Raise OSError if `path` does not exist.
    """
    name = user(os.geteuid()).rpartition(" ")[2]  # '4242' for a user without a name
    return path_ownership_problems(path, f"choose your own folder: runs_dir={shell(str(path / name))}")


def make_folders(path: Path) -> None:
    """Create `path` and its parents. Only this user can write to the new folders, whatever the umask is.

    Raise OSError if a folder can't be created.
    """
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)


def user(number: int) -> str:
    """Return the name of the user with the id `number`, or a text such as 'user 4242' if that id has no name."""
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
    """Return whether this user is the only member of the group.

    On systems with umask 002, each user usually has a private group.
    """
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
