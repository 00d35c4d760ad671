"""A folder of checkpoints: FOLDER/step-00000042 is there whole, or it is not loaded.

A step is written into FOLDER/.step-00000042.JOB.SAVE.tmp, where SAVE is random, and renamed when every file has reached
the disk. checkpoint.json is written last and lists all files with their sizes and checksums: it shows a copy that was
cut short, files that a purge took, a damaged file and a file of another save. owner.py has the rules for several jobs
in one folder.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import re
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpcinit.base.console import say
from hpcinit.base.errors import CheckpointError, RequestError
from hpcinit.rendezvous.process_state import state
from hpcinit.runtime.checkpoint import owner as owners
from hpcinit.runtime.checkpoint.owner import Owner

# Checksums of files: they show a file that is damaged at its full size, and a file of another save.
#
# CRC32 of each SEGMENT, and the CRC32 of those numbers: segments of one file are read by several threads at a time.

SEGMENT = 64 << 20
BUFFER = 4 << 20
THREADS = 8  # at most


def checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return relative path -> checksum. Raise OSError."""
    segments = {name: range(0, (folder / name).stat().st_size, SEGMENT) for name in names}
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        started = {name: [pool.submit(_crc32, folder / name, at) for at in found] for name, found in segments.items()}
        return {
            name: zlib.crc32(b"".join(part.result().to_bytes(4, "big") for part in parts))
            for name, parts in started.items()
        }


def _crc32(path: Path, begin: int) -> int:
    """Return the CRC32 of one segment of the file."""
    found, left, buffer = 0, SEGMENT, memoryview(bytearray(BUFFER))
    with path.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while left and (number := stream.readinto(buffer[: min(left, BUFFER)])):
            found, left = zlib.crc32(buffer[:number], found), left - number
    return found


# Removal of folders in the background: no rank waits for it, and a failure is a line on stderr, not an error.

SUFFIX = ".gone"
AT_EXIT_S = 10.0  # less than the 30 s after which Slurm kills (KillWait); a later save removes what is left


def remove_later(work: Callable[[], None]) -> None:
    """Run `work` in a thread, after all that was given before. Print a line if it raises OSError."""
    if state.removal is None:
        atexit.register(wait_for_removals, AT_EXIT_S)
    before = state.removal

    def run() -> None:
        if before is not None:
            before.join()
        try:
            work()
        except OSError as error:
            say(f"warning: an old checkpoint could not be removed: {error}")

    state.removal = threading.Thread(target=run, name="hpcinit-removal", daemon=True)
    state.removal.start()


def wait_for_removals(seconds: float) -> bool:
    """Wait until all removals are done, at most so long; return whether they are."""
    last = state.removal
    if last is None:
        return True
    last.join(seconds)
    return not last.is_alive()


def set_aside(path: Path) -> Path:
    """Rename the folder, so that half of it never has the name of the whole. Return the new name. Raise OSError."""
    aside = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}{SUFFIX}")
    path.rename(aside)
    return aside


def remove_folder(path: Path) -> None:
    """Raise OSError, but not if another process removes it at the same time."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path if path.name.endswith(SUFFIX) else set_aside(path))


METADATA = "checkpoint.json"
FORMAT = 2
OWNER = "owner.json"  # in an unfinished step: whose it is
SHORT_S = 5.0  # for earlier removals, where the disk has room without them
VISIBLE_S = 60.0  # NFS keeps what it knows of a folder for up to a minute (acdirmax)
_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\..+\.tmp")


@dataclass(frozen=True)
class File:
    """What a rank wrote. checksum: checksums()."""

    bytes: int
    checksum: int
    rank: int


@dataclass(frozen=True)
class Description:
    """What checkpoint.json says. samples: seen by all ranks together. zero_stage: None without DeepSpeed.

    data_parallel: shares of the data, each with its own place in it. save: random, of this one save. owner: the job
    that wrote it. files: relative path -> File.
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
    """A step that is being written: the folder, which save it is, and whose."""

    path: Path
    save: str
    owner: Owner


def name(step: int) -> str:
    """Raises RequestError for a step below 0."""
    if step < 0:
        raise RequestError(f"a checkpoint of step {step}, expected 0 or more")
    return f"step-{step:08d}"


def _has_room(folder: Path) -> bool:
    """Whether twice the newest step fits on the disk; False where that is not known."""
    try:
        found = newest(folder, lambda _: None)
        return found is not None and shutil.disk_usage(folder).free > 2 * sum(
            one.bytes for one in found[1].files.values()
        )
    except OSError:
        return False


def begin(folder: Path, step: int, owner: Owner, removals_s: float = 0.0) -> Unfinished:
    """Make `owner` the owner of the folder, and a new folder in it to write the step into.

    Removal of what dead jobs left there begins in the background. removals_s: how long to wait for earlier removals,
    which free space on the disk; less where the disk has room without them. Raise RequestError if the step is there
    already or the folder belongs to another job, OSError.
    """
    final = folder / name(step)
    patience_s = min(removals_s, SHORT_S) if _has_room(folder) else removals_s
    if not wait_for_removals(patience_s):
        say(f"warning: older checkpoints in {folder} are still being removed after {patience_s:g} s: saving anyway")
    if final.exists() and problem(final) is None:
        raise RequestError(_there_already(final))
    folder.mkdir(parents=True, exist_ok=True)
    before = owners.claim(folder, owner)
    if before is not None and not owners.is_dead(before, owner, untouched_s=0.0):
        say(f"{owner} takes over {folder} from {before}: if that one still runs, its next save will fail")
    sweep(folder, owner)
    save = secrets.token_hex(8)
    label = re.sub(r"[^\w.+-]", "_", owner.job) or "job"
    path = folder / f".{name(step)}.{label}.{save}.tmp"
    path.mkdir()
    owners.write(path / OWNER, owner)
    return Unfinished(path, save, owner)


def publish(unfinished: Unfinished, description: Description) -> Path:
    """Give the written folder its name.

    Raise CheckpointError if a file of another node is not seen here, RequestError if another job has taken the folder
    over or has published this step, OSError.
    """
    temporary = unfinished.path
    owners.claim(temporary.parent, unfinished.owner)  # a later owner may have removed the files
    _see(temporary, description.files)
    document = {"format": FORMAT, **asdict(description)}
    write(temporary / METADATA, (json.dumps(document, indent=1) + "\n").encode())
    (temporary / OWNER).unlink()
    for inner, _, _ in os.walk(temporary):
        sync(Path(inner))
    final = temporary.parent / name(description.step)
    owners.claim(final.parent, unfinished.owner)
    if final.exists() and problem(final) is not None:
        discard(set_aside(final))
    try:
        temporary.rename(final)  # fails if `final` is a folder with anything in it
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise RequestError(_there_already(final)) from error
        raise
    sync(final.parent)
    return final


def sweep(folder: Path, owner: Owner) -> None:
    """Remove, in the background, what was set aside and the unfinished steps of dead jobs. Raise OSError.

    This job must not be writing a step.
    """
    names = [path.name for path in folder.iterdir()]
    leftovers = [folder / each for each in names if _UNFINISHED.fullmatch(each)]
    aside = [folder / each for each in names if each.endswith(SUFFIX)]
    for path in aside:
        discard(path)
    for path in leftovers:
        remove_later(partial(_remove_if_dead, path, owner))


def discard(path: Path) -> None:
    """Remove the folder in the background."""
    remove_later(partial(remove_folder, path))


def _there_already(final: Path) -> str:
    by = ""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if (owner := describe(final).owner) is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(final.stat().st_mtime))
            by = f", written by {owner} at {at}"
    return f"{final} is there already{by}: load it and go on from there, or save into another folder (or remove it)"


def _remove_if_dead(path: Path, mine: Owner) -> None:
    owner = owners.read(path / OWNER)
    untouched_s = time.time() - _last_change(path)
    if owners.is_dead(owner, mine, untouched_s) if owner else untouched_s > mine.timeout_s:
        remove_folder(path)


def _last_change(folder: Path) -> float:
    """Return when a file or folder in it last changed, in seconds since 1970."""
    times = [0.0]
    for inner, _, names in os.walk(folder):
        for each in (".", *names):
            with suppress(OSError):
                times.append(Path(inner, each).stat().st_mtime)
    return max(times)


def newest(folder: Path, say: Callable[[str], None]) -> tuple[Path, Description] | None:
    """The latest step that is whole; one line for each later one that is not."""
    for path in _steps(folder):
        wrong = problem(path)
        if wrong is None:
            return path, describe(path)
        say(f"checkpoint {path} is skipped: {wrong}")
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest whole ones, and what is older than those. Raise OSError."""
    whole = [path for path in _steps(folder) if problem(path) is None]
    if len(whole) > keep:
        last = whole[keep - 1].name
        for path in _steps(folder):
            if _number(path) < _number(folder / last):
                remove_folder(path)


def problem(path: Path) -> str | None:
    """Why the checkpoint in `path` cannot be used, None if it is whole as far as names and sizes show."""
    try:
        description = describe(path)
    except FileNotFoundError:
        return f"it has no {METADATA}, which is written last"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its {METADATA} cannot be read ({error})"
    for relative, file in description.files.items():
        try:
            found = (path / relative).stat().st_size
        except OSError as error:
            return f"{relative} cannot be read ({error.strerror})"
        if found != file.bytes:
            return f"{relative} has {found} bytes, and {file.bytes} were written"
    return state.damaged.get((path, description.save))


def damage(path: Path, description: Description, rank: int, ranks: int) -> str | None:
    """Read this rank's share of the files; return which one has another content than was written, None for none.

    A rank reads the files of the rank that wrote them under its number, which it will mostly load itself.
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
    return f"{wrong[0]}{more} does not have the content that was written: it is damaged, or from another save"


def remember_damage(path: Path, description: Description, wrong: str) -> None:
    """From now on problem() reports it in this process, so that the step is saved again and does not count as whole."""
    state.damaged[path, description.save] = wrong


def describe(path: Path) -> Description:
    """Raises OSError, ValueError, TypeError, KeyError or AttributeError for what is no description."""
    document: dict[str, Any] = json.loads((path / METADATA).read_text())
    if (made := document.pop("format")) != FORMAT:
        raise ValueError(f"format {made}, and this version of hpcinit reads format {FORMAT}")
    files = {name: File(**file) for name, file in document.pop("files").items()}
    owner = document.pop("owner")
    return Description(**document, files=files, owner=Owner(**owner) if owner else None)


def files_of(folder: Path, names: Iterable[str], rank: int) -> dict[str, File]:
    """Return what is recorded of the files that this rank has written. Raise OSError."""
    found = checksums(folder, names)
    return {name: File((folder / name).stat().st_size, checksum, rank) for name, checksum in found.items()}


def write(path: Path, content: bytes) -> None:
    """Raises OSError. On the disk when it returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """What was written to a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def matching(folder: Path, *patterns: str) -> list[str]:
    """Return the relative paths of the files in `folder` that match a glob pattern."""
    found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return [path.relative_to(folder).as_posix() for path in found]


def _see(folder: Path, files: Mapping[str, File]) -> None:
    limit = time.monotonic() + VISIBLE_S
    while missing := [each for each, file in files.items() if not _has(folder / each, file.bytes)]:
        if time.monotonic() > limit:
            raise CheckpointError(
                f"{len(missing)} of {len(files)} files, as {missing[0]}, were written and are not seen in {folder} by "
                "rank 0: checkpoints need a folder that all nodes share"
            )
        time.sleep(0.5)


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _steps(folder: Path) -> list[Path]:
    """Newest first."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
