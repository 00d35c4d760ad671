"""Manages a folder of checkpoints. FOLDER/step-00000042 is loaded only if it is a complete checkpoint.

The ranks first write a checkpoint into FOLDER/.step-00000042.JOB.SAVE.tmp, where SAVE is random. When all files are on
the disk, rank 0 renames this folder. checkpoint.json lists all files with their sizes and checksums, so that load()
detects missing, truncated and damaged files, and files of another save. owner.py contains the rules for several jobs in
one folder.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import re
import secrets
import shlex
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import CheckpointError, RequestError
from hpcinit.records import run_folder
from hpcinit.runtime.process_state import state
from hpcinit.train.checkpoint import owner as owners
from hpcinit.train.checkpoint.owner import Owner

# Checksums detect a damaged file of the right size, and a file of another save. A file's checksum is the CRC32 of the
# CRC32s of its segments, so that several threads can read one file.

SEGMENT = 64 << 20
BUFFER = 4 << 20
THREADS = 8  # maximum


def checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the checksum of each file in `names`, by its relative path. Raise OSError if a file cannot be read."""
    segments = {name: range(0, (folder / name).stat().st_size, SEGMENT) for name in names}
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        started = {name: [pool.submit(_crc32, folder / name, at) for at in found] for name, found in segments.items()}
        return {
            name: zlib.crc32(b"".join(part.result().to_bytes(4, "big") for part in parts))
            for name, parts in started.items()
        }


def _crc32(path: Path, begin: int) -> int:
    found, left, buffer = 0, SEGMENT, memoryview(bytearray(BUFFER))
    with path.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while left and (number := stream.readinto(buffer[: min(left, BUFFER)])):
            found, left = zlib.crc32(buffer[:number], found), left - number
    return found


# Folders are removed in the background, so that no rank waits. If a removal fails, hpcinit only prints a warning.

SUFFIX = ".gone"
AT_EXIT_S = 10.0  # how long to wait at exit: less than Slurm's KillWait of 30 s. A later save removes the rest


def remove_later(work: Callable[[], None]) -> None:
    """Run `work` in a thread, after all earlier removals have finished. If it raises OSError, print a warning."""
    if state.removal is None:
        atexit.register(wait_for_removals, AT_EXIT_S)
    before = state.removal

    def run() -> None:
        if before is not None:
            before.join()
        try:
            work()
        except OSError as error:
            say(f"warning: cannot remove an old checkpoint: {error}")

    state.removal = threading.Thread(target=run, name="hpcinit-removal", daemon=True)
    state.removal.start()


def wait_for_removals(seconds: float) -> bool:
    """Wait at most `seconds` until all removals have finished. Return whether they have."""
    last = state.removal
    if last is None:
        return True
    last.join(seconds)
    return not last.is_alive()


def set_aside(path: Path) -> Path:
    """Rename a folder before its removal, and return its new path. Raise OSError if that fails.

    If the removal is interrupted, the rest of the folder cannot be mistaken for a complete checkpoint.
    """
    aside = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}{SUFFIX}")
    path.rename(aside)
    return aside


def remove_folder(path: Path) -> None:
    """Remove the folder. Raise OSError if that fails, unless another process is removing it at the same time."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path if path.name.endswith(SUFFIX) else set_aside(path))


METADATA = "checkpoint.json"
FORMAT = 2
OWNER = "owner.json"  # in the folder of an unfinished step: its owner
SHORT_S = 5.0  # how long to wait for earlier removals if the disk has enough space anyway
VISIBLE_S = 60.0  # how long to wait for a file to appear: NFS caches a folder's content for up to a minute
_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\..+\.tmp")


@dataclass(frozen=True)
class File:
    """A file of a checkpoint, and the rank that wrote it.

    checksum: what checksums() returned for it.
    """

    bytes: int
    checksum: int
    rank: int


@dataclass(frozen=True)
class Description:
    """The content of checkpoint.json.

    samples: how many samples all ranks together had processed.
    zero_stage: the ZeRO stage, or None without DeepSpeed.
    data_parallel: how many shares the data had. Each share has its own loader position.
    save: a random id of this save.
    owner: the job that wrote the checkpoint.
    files: a File for each relative path.
    """

    step: int
    samples: int
    wrap: str
    world_size: int
    layout: Mapping[str, int]
    data_parallel: int
    seed: int
    zero_stage: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    save: str = ""
    owner: Owner | None = None
    files: Mapping[str, File] = field(default_factory=dict)


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written: its folder, the id of the save, and the owner."""

    path: Path
    save: str
    owner: Owner


def name(step: int) -> str:
    """Return the name of the folder for the checkpoint of a step. Raise RequestError if the step is negative."""
    if step < 0:
        raise RequestError(f"the step of a checkpoint is {step}, expected 0 or more")
    return f"step-{step:08d}"


def _has_room(folder: Path) -> bool:
    """Return whether the disk certainly has room for two more checkpoints that are as large as the newest one."""
    try:
        found = newest(folder, lambda _: None)
        return found is not None and shutil.disk_usage(folder).free > 2 * sum(
            one.bytes for one in found[1].files.values()
        )
    except OSError:
        return False


def begin(folder: Path, step: int, owner: Owner, removals_s: float = 0.0) -> Unfinished:
    """Make `owner` the owner of the folder, and create a subfolder for a new checkpoint.

    In the background, remove unfinished checkpoints of ended jobs. Raise RequestError if there already is a checkpoint
    of this step, or if the folder belongs to another job. Raise OSError if writing fails.

    removals_s: how many seconds to wait for earlier removals, which free disk space. The wait is shorter if the disk
        already has enough space.
    """
    final = folder / name(step)
    patience_s = min(removals_s, SHORT_S) if _has_room(folder) else removals_s
    if not wait_for_removals(patience_s):
        say(f"warning: removing older checkpoints in {folder} takes more than {patience_s:g} s; saving anyway")
    if final.exists() and problem(final) is None:
        raise RequestError(_exists_already(final))
    folder.mkdir(parents=True, exist_ok=True)
    before = owners.claim(folder, owner)
    if before is not None and not owners.has_ended(before, owner):
        say(f"{owner} takes over {folder} from {before}; if {before} is still running, its next save will fail")
    sweep(folder, owner)
    save = secrets.token_hex(8)
    label = re.sub(r"[^\w.+-]", "_", owner.job) or "job"
    path = folder / f".{name(step)}.{label}.{save}.tmp"
    path.mkdir()
    try:
        owners.write(path / OWNER, owner)
    except OSError:  # a full disk
        shutil.rmtree(path, ignore_errors=True)
        raise
    return Unfinished(path, save, owner)


def publish(unfinished: Unfinished, description: Description) -> Path:
    """Rename the folder of a checkpoint to its final name, after all ranks have written their files.

    Raise CheckpointError if this node cannot see a file that another node wrote. Raise RequestError if another job is
    now using the folder or has published this step, and OSError if writing fails.
    """
    temporary = unfinished.path
    owners.claim(temporary.parent, unfinished.owner)  # fails first if a later owner has removed the files
    _see(temporary, description.files)
    document = {"format": FORMAT, **asdict(description)}
    write(temporary / METADATA, (json.dumps(document, indent=1) + "\n").encode())
    for inner, _, _ in os.walk(temporary):
        sync(Path(inner))
    final = temporary.parent / name(description.step)
    owners.claim(final.parent, unfinished.owner)
    if final.exists() and problem(final) is not None:
        discard(set_aside(final))
    try:
        temporary.rename(final)  # fails if `final` is a folder that is not empty
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise RequestError(_exists_already(final)) from error
        raise
    (final / OWNER).unlink()  # last, because an unfinished step without this file is never removed
    sync(final.parent)
    return final


def sweep(folder: Path, owner: Owner) -> None:
    """In the background, remove folders that were set aside, and this user's unfinished checkpoints of ended jobs.

    Print a message if it is unknown whether such a job has ended. Do not call this while this job is writing a
    checkpoint. Raise OSError if `folder` cannot be read.
    """
    names = [path.name for path in folder.iterdir()]
    leftovers = [folder / each for each in names if _UNFINISHED.fullmatch(each)]
    aside = [folder / each for each in names if each.endswith(SUFFIX)]
    for path in aside:
        discard(path)
    for path in leftovers:
        remove_later(partial(remove_if_ended, path, owner))


def discard(path: Path) -> None:
    """Remove the folder in the background."""
    remove_later(partial(remove_folder, path))


def abandon(unfinished: Path) -> None:
    """Rename an unfinished checkpoint so that all its writers fail, and remove it in the background."""
    with suppress(OSError):  # already gone, or published
        discard(set_aside(unfinished))


def what_is_left(folder: Path) -> str:
    """Return the free disk space and the newest complete checkpoint, for the message about a save that failed."""
    before = newest(folder, lambda _: None)
    left = f"{before[0].name} is the newest checkpoint" if before else "there is no older checkpoint"
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free on this disk; {left}"
    except OSError:
        return left


def _exists_already(final: Path) -> str:
    by = ""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if (owner := describe(final).owner) is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(final.stat().st_mtime))
            by = f", written by {owner} at {at}"
    return f"{final} already exists{by}: load it and continue from there, save into another folder, or remove it"


def remove_if_ended(path: Path, mine: Owner) -> None:
    """Remove an unfinished checkpoint of this user if its job has ended. If that is unknown, print a message.

    Raise OSError if the folder cannot be removed.
    """
    if not safe_files.is_own(path):  # its owner removes it
        return
    owner = owners.read(path / OWNER)
    ended = None if owner is None else owners.has_ended(owner, mine)
    if ended:
        remove_folder(path)
    elif ended is None and path.exists():
        _report(path, str(owner or "an unknown job"))


@cache
def _report(path: Path, owner: str) -> None:
    say(f"{owner} may still write into this unfinished folder. If that job has ended: rm -r {shlex.quote(str(path))}")


def newest(folder: Path, say: Callable[[str], None]) -> tuple[Path, Description] | None:
    """Return the newest complete checkpoint, or None. Print a line for each newer checkpoint that is not complete."""
    for path in _steps(folder):
        wrong = problem(path)
        if wrong is None:
            return path, describe(path)
        say(f"checkpoint {path} is skipped: {wrong}")
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints that are older than the `keep` newest complete ones. Raise OSError if that fails."""
    whole = [path for path in _steps(folder) if problem(path) is None]
    if len(whole) > keep:
        last = whole[keep - 1].name
        for path in _steps(folder):
            if _number(path) < _number(folder / last):
                remove_folder(path)


def problem(path: Path) -> str | None:
    """Return why the checkpoint cannot be used, or None if it is complete. Only file names and sizes are checked."""
    try:
        description = describe(path)
    except FileNotFoundError:
        return f"it has no {METADATA}, which is written last, so the save did not finish"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its {METADATA} cannot be read ({error})"
    for relative, file in description.files.items():
        try:
            found = (path / relative).stat().st_size
        except OSError as error:
            return f"{relative} cannot be read ({error.strerror})"
        if found != file.bytes:
            return f"{relative} has {found} bytes, expected {file.bytes}"
    return state.damaged.get((path, description.save))


def damage(path: Path, description: Description, rank: int, ranks: int) -> str | None:
    """Check the content of this rank's share of the files. Return what is damaged, or None.

    Rank N checks the files that rank N wrote, because it will load mostly these files.
    """
    mine = {name: file for name, file in description.files.items() if file.rank % ranks == rank}
    try:
        found = checksums(path, mine)
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})"
    wrong = [name for name, file in mine.items() if found[name] != file.checksum]
    if not wrong:
        return None
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more} has a wrong checksum: it is damaged, or from another save"


def remember_damage(path: Path, description: Description, wrong: str) -> None:
    """Make problem() return this damage from now on, in this process. newest() then skips the checkpoint."""
    state.damaged[path, description.save] = wrong


def describe(path: Path) -> Description:
    """Return the content of the checkpoint's checkpoint.json. If it is not valid, raise an error.

    The error is an OSError, ValueError, TypeError, KeyError or AttributeError.
    """
    document: dict[str, Any] = json.loads((path / METADATA).read_text())
    if (made := document.pop("format")) != FORMAT:
        raise ValueError(f"its format is {made}, but this version of hpcinit can read only format {FORMAT}")
    files = {name: File(**file) for name, file in document.pop("files").items()}
    owner = document.pop("owner")
    return Description(**document, files=files, owner=run_folder.from_known_fields(Owner, owner) if owner else None)


def files_of(folder: Path, names: Iterable[str], rank: int) -> dict[str, File]:
    """Return a File with size and checksum for each file that this rank has written, by relative path.

    Raise OSError if a file cannot be read.
    """
    found = checksums(folder, names)
    return {name: File((folder / name).stat().st_size, checksum, rank) for name, checksum in found.items()}


def write(path: Path, content: bytes) -> None:
    """Write the file and make sure that it is on the disk. Raise OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Make sure that a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def matching(folder: Path, *patterns: str) -> list[str]:
    """Return the relative paths of the files in `folder` that match one of the glob patterns."""
    found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return [path.relative_to(folder).as_posix() for path in found]


def _see(folder: Path, files: Mapping[str, File]) -> None:
    limit = time.monotonic() + VISIBLE_S
    while missing := [each for each, file in files.items() if not _has(folder / each, file.bytes)]:
        if time.monotonic() > limit:
            raise CheckpointError(
                f"rank 0 does not see {len(missing)} of {len(files)} written files in {folder}, such as {missing[0]}: "
                "the checkpoint folder must be on a file system that all nodes share"
            )
        time.sleep(0.5)


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _steps(folder: Path) -> list[Path]:
    """Return the folders of all steps, newest first."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
