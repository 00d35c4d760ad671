"""The secret that the ranks of one start share: from the submission, from HPCINIT_NONCE, or from a file of mode 0600.

The file is for ranks that no script of ours started (a plain `srun python -m hpcinit.run ...`, mpirun): the first of
them that looks creates it, in the working folder, or in ~/.cache/hpcinit where that cannot be. The next ranks read it,
and rank 0 removes it once all have come. Without a secret, anyone who knows the job's number can act as a rank.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpcinit.base.console import say
from hpcinit.records import scratch
from hpcinit.records.spec import Spec
from hpcinit.rendezvous.process_state import state
from hpcinit.world import World

ENV_NONCE = "HPCINIT_NONCE"
HEAD = "hpcinit-nonce-1 "  # so that no other private file of this user is taken for one
# What only one node or one container sees, so that ranks of other nodes would not find a file in it.
PRIVATE = {"overlay", "tmpfs", "ramfs", "rootfs", "squashfs", "fuse.fuse-overlayfs", "fuse.squashfuse"}
FIRST_S = 1.0  # for which ranks that are not the first of their node leave it to that one to create the file
OLD_S = 7 * 86_400.0  # age of files in ~/.cache/hpcinit that ranks left when they were killed
WARNING = (
    "warning: the ranks of this job share no secret, since no folder for it is shared and writable: another user of "
    "its nodes who knows the number of the job can act as a rank, and then run code as you. To prevent it, add this to "
    f"the batch script, before srun or mpirun: export {ENV_NONCE}=$(cat /proc/sys/kernel/random/uuid)"
)


def find(world: World, spec: Spec | None) -> str:
    """Return the secret of this start, '' where there is none; rank 0 prints a warning then.

    It is left in HPCINIT_NONCE for what this process starts: other users cannot read a process's environment.
    """
    if spec is not None:
        return spec.nonce
    if not os.environ.get(ENV_NONCE):
        found = _shared(world)
        if found:
            os.environ[ENV_NONCE] = found
        elif world.rank == 0:
            say(WARNING)
    return os.environ.get(ENV_NONCE, "")


def remove() -> None:
    """Remove the file that this process read or created. To be called by rank 0, once all ranks have come."""
    if state.nonce_file is not None:
        with suppress(OSError):
            state.nonce_file.unlink()
        state.nonce_file = None


def _shared(world: World) -> str:
    name = f".hpcinit-{scratch.folder_name(world.job)}.nonce"
    places = [place for place in _places() if _is_shared(place, world)]
    until = time.monotonic() + (FIRST_S if world.local_rank else 0.0)
    while True:
        for place in places:
            if found := _read(place / name):
                state.nonce_file = place / name
                return found
        if time.monotonic() >= until:
            break
        time.sleep(0.02)
    for place in places:
        if found := _create(place / name):
            state.nonce_file = place / name
            return found
    return ""


def _places() -> Iterator[Path]:
    with suppress(OSError):
        yield Path.cwd()
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcinit"
        if cache.is_absolute():
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_old(cache)
            yield cache


def _remove_old(folder: Path) -> None:
    for file in folder.glob(".hpcinit-*"):
        with suppress(OSError):
            if file.lstat().st_mtime < time.time() - OLD_S:
                file.unlink()


def _is_shared(place: Path, world: World) -> bool:
    """Whether all ranks may see the same files there. The launcher 'env' names no nodes, and they may be several."""
    return (world.nodes == 1 and world.launcher != "env") or file_system(place) not in PRIVATE


def file_system(place: Path) -> str:
    """Return the type of the file system of `place`, as /proc/self/mountinfo has it; '' where that is not known."""
    here, found, longest = place.resolve(), "", -1
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            words = line.split()
            at = Path(words[4].replace("\\040", " "))
            # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw: the type follows the lone dash.
            if here.is_relative_to(at) and len(at.parts) >= longest:
                found, longest = words[words.index("-") + 1], len(at.parts)
    return found


def _read(path: Path) -> str:
    """Return the secret in the file, '' if there is none or if another user could have read or written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return ""
        text = os.read(descriptor, 200).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    match = re.fullmatch(rf"{HEAD}([0-9a-f]{{32}})\n", text)
    return match[1] if match else ""


def _create(path: Path) -> str:
    """Return the secret of a new file, or of the one that another rank has created meanwhile; '' if neither works.

    A link is made only if there is no such file, and shows it whole, on network file systems too.
    """
    mine = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    with suppress(OSError):
        descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{HEAD}{secrets.token_hex(16)}\n")
            with suppress(FileExistsError):
                os.link(mine, path)
        finally:
            mine.unlink()
    return _read(path)
