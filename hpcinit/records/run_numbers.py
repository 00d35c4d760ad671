"""Numbers the runs in a runs_dir: NAME-0042. A number is never reused, even after its folder was removed.

An empty file `.NAME-0042.number`, called a mark, shows that the number is used. The number is in the file's name,
because a name is never half-written, not even over NFS. For each name, hpcinit keeps the highest mark and the KEPT
numbers below it. It removes lower marks only after it has submitted a run.

take() refuses a number that has a mark, or that is so low that its mark may have been removed. So a slow submission
can't reuse the number of a run that another submission has created and removed meanwhile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hpcinit.base import safe_files

_RUN = re.compile(r"(?P<name>.+)-(?P<number>\d{4,9})")  # hpcinit never writes more digits
KEPT = 20  # marks of a name that remain below the highest mark


def next_number(runs_dir: Path, name: str, promised: Collection[str] = ()) -> int:
    """Return the next free number of runs with this name: one more than the highest that this user has used.

    A number is used if its folder or its mark exists.

    promised: the names of folders that will be created. Their numbers count as used.
    """
    names = {*_names(runs_dir), *promised}
    found = sorted(((number, one) for one in names for number in _numbers(one, name)), reverse=True)
    last = next((number for number, one in found if one in promised or safe_files.is_own(runs_dir / one)), 0)
    # In a shared runs_dir the next entries may be another user's.
    while names & {f"{name}-{last + 1:04d}", f".{name}-{last + 1:04d}.number"}:
        last += 1
    return last + 1


def take(run: Path) -> None:
    """Record that the new folder `run` uses its number.

    Raise FileExistsError if another run may have used the number, and OSError if the mark cannot be written.
    """
    mark(run, os.O_EXCL)
    if (found := _RUN.fullmatch(run.name)) and next_number(run.parent, found["name"]) - int(found["number"]) > KEPT:
        unmark(run)
        raise FileExistsError(run)


def mark(run: Path, flags: int = 0) -> None:
    """Create the mark that records the number of the folder `run`. Raise OSError if the file cannot be written.

    flags: additional flags for os.open.
    """
    os.close(os.open(_mark(run), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600))


def unmark(run: Path) -> None:
    """Remove the mark of a number whose run was never submitted."""
    with suppress(OSError):
        _mark(run).unlink()


def remove_lower(run: Path) -> None:
    """After `run` was submitted, remove the marks of the same name that are more than KEPT numbers lower."""
    if not (found := _RUN.fullmatch(run.name)):  # a task of a sweep
        return
    for one in _names(run.parent):
        if one.startswith(".") and any(number < int(found["number"]) - KEPT for number in _numbers(one, found["name"])):
            with suppress(OSError):
                (run.parent / one).unlink()


def keep(runs: Iterable[Path]) -> None:
    """Mark the highest number of each name as used. Call this before these run folders are removed.

    Raise OSError if a mark cannot be written.
    """
    highest: dict[tuple[Path, str], tuple[int, Path]] = {}
    for run in runs:
        if found := _RUN.fullmatch(run.name):
            key, one = (run.parent, found["name"]), (int(found["number"]), run)
            highest[key] = max(one, highest.get(key, one))
    for _, run in highest.values():
        mark(run)


def is_mark(path: str) -> bool:
    """Return whether the file is one of the marks that record run numbers."""
    return bool(re.fullmatch(r"\..+-\d{4,9}\.number", path.rpartition("/")[2]))


def _mark(run: Path) -> Path:
    return run.with_name(f".{run.name}.number")


def _numbers(entry: str, name: str) -> Iterator[int]:
    """Yield the number of `entry` if it is a folder or a mark of runs with this name."""
    folder = entry[1:].removesuffix(".number") if entry.startswith(".") and entry.endswith(".number") else entry
    if (found := _RUN.fullmatch(folder)) and found["name"] == name:
        yield int(found["number"])


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names of a thousand folders
    except OSError:
        return []
