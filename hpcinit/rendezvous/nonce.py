"""Finds the secret that the ranks of one attempt share: from the submission, HPCINIT_NONCE, or a file of mode 0600.

The file is for ranks that were started without `hpcinit submit`, for example with `srun python -m hpcinit.run ...` or
mpirun. The first rank that looks for the file creates it, in the working folder or else in ~/.cache/hpcinit. The other
ranks read the file, and rank 0 removes it after all ranks have connected. If rank 0 is killed before that, the next
start in the folder removes the file. Without a secret, anyone who knows the job's id could act as a rank.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpcinit.base import processes, safe_files
from hpcinit.base.console import say
from hpcinit.records import scratch
from hpcinit.records.spec import Spec
from hpcinit.world import World

ENV_NONCE = "HPCINIT_NONCE"
HEAD = "hpcinit-nonce-1 "  # the file starts with this, so that another private file is not mistaken for it
# File systems that only one node or one container has. Ranks of other nodes would not find the file there.
PRIVATE = {"overlay", "tmpfs", "ramfs", "rootfs", "squashfs", "fuse.fuse-overlayfs", "fuse.squashfuse"}
FIRST_S = 1.0  # other ranks of a node wait this long for its first rank to create the file
OLD_S = 86_400.0  # remove a file of this age even if its creator may be alive, because no start-up takes so long
WARNING = (
    "warning: the ranks of this job share no secret, because they have no shared writable folder for it. Another user "
    "on the job's nodes who knows the job id could act as a rank and run code as you. To prevent this, add to the "
    f"batch script, before srun or mpirun: export {ENV_NONCE}=$(cat /proc/sys/kernel/random/uuid)"
)


class Secret(NamedTuple):
    """The secret that the ranks share.

    text: the secret, or '' if the ranks share none.
    file: the file that this process read or created, or None.
    """

    text: str
    file: Path | None = None

    def remove(self) -> None:
        """Remove the file that contains the secret. Rank 0 calls this after all ranks have connected."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()


def find(world: World, spec: Spec | None) -> Secret:
    """Return the secret that the ranks share. If there is none, rank 0 prints a warning.

    Also set HPCINIT_NONCE to the secret, for child processes. Other users cannot read a process's environment.
    """
    if spec is not None:
        return Secret(spec.nonce)
    if known := os.environ.get(ENV_NONCE):
        return Secret(known)
    found = _from_shared_file(world)
    if found.text:
        os.environ[ENV_NONCE] = found.text
    elif world.rank == 0:
        say(WARNING)
    return found


def _from_shared_file(world: World) -> Secret:
    """Return the secret in the file that all ranks can read. Create the file if this rank is the first."""
    name = f".hpcinit-{scratch.folder_name(world.job)}.nonce"
    places = list[Path]()
    for place in _candidate_folders():
        if world.rank == 0:
            _remove_leftovers(place, name)
        if _is_shared(place, world):
            places.append(place)
    until = time.monotonic() + (FIRST_S if world.local_rank else 0.0)
    while True:
        for place in places:
            if found := _read_secret(place / name):
                return Secret(found, place / name)
        if time.monotonic() >= until:
            break
        time.sleep(0.02)
    for place in places:
        if found := _create_secret(place / name):
            return Secret(found, place / name)
    return Secret("")


def _candidate_folders() -> Iterator[Path]:
    """Yield the folders that may contain the file, starting with the preferred one."""
    with suppress(OSError):
        yield Path.cwd()
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcinit"
        if cache.is_absolute():
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            yield cache


def _remove_leftovers(folder: Path, name: str) -> None:
    """Remove the files of this user's earlier start-ups that were killed.

    Keep the file `name`, because other ranks of this start-up may use it.
    """
    with suppress(OSError):
        for file in folder.glob(".hpcinit-*.nonce*"):
            with suppress(OSError):
                found = file.lstat()
                is_ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
                if is_ours and file.name != name and (found.st_mtime < time.time() - OLD_S or _creator_has_ended(file)):
                    file.unlink()


def _creator_has_ended(path: Path) -> bool:
    """Return True if the process that created the file has certainly ended.

    Return False if it may be alive, for example on another node.
    """
    try:
        return bool(processes.Process(**json.loads(_read(path).partition("\n")[2])).has_ended())
    except (ValueError, TypeError):
        return False


def _is_shared(place: Path, world: World) -> bool:
    """Return whether all ranks probably see the same files in the folder `place`.

    If the launcher is 'env', which doesn't report nodes, assume that there are several nodes.
    """
    return (world.nodes == 1 and world.launcher != "env") or safe_files.file_system(place) not in PRIVATE


def _read_secret(path: Path) -> str:
    """Return the secret in the file, or '' if there is none or another user could have read or written it."""
    match = re.match(rf"{HEAD}([0-9a-f]{{32}})\n", _read(path))
    return match[1] if match else ""


def _read(path: Path) -> str:
    """Return the content of the file, or '' if it is missing or another user could have read or written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return ""
        return os.read(descriptor, 1000).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _create_secret(path: Path) -> str:
    """Create the file with a new secret, and return the secret. Return '' if that fails.

    If another rank creates the file first, return that rank's secret. A hard link makes the complete file visible at
    once. It cannot replace an existing file, even on network file systems.
    """
    mine = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    with suppress(OSError):
        descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{HEAD}{secrets.token_hex(16)}\n{json.dumps(processes.identity())}\n")
            with suppress(FileExistsError):
                os.link(mine, path)
        finally:
            mine.unlink()
    return _read_secret(path)
