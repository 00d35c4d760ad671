"""The run folder: claimed, filled, and marked as submitted only when it is."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpcinit.facts import ownership, runfolder, whole_file
from hpcinit.facts.errors import NOTHING_SUBMITTED, SubmitError

PRIVATE, PRIVATE_FILE = 0o700, 0o600


_promised: set[Path] = set()  # by next_path in this process: the dry run of a sweep prints several scripts


def next_path(runs_dir: Path, name: str) -> Path:
    """The folder that claim() would make, and at the next call the one after it. Touches nothing."""
    path = _free(runs_dir, name, _promised)
    _promised.add(path)
    return path


def _free(runs_dir: Path, name: str, promised: Collection[Path] = ()) -> Path:
    """runs_dir/NAME-0001, or the number after the highest there is."""
    pattern = re.compile(re.escape(name) + r"-(\d{4,})")
    there = [path for path in promised if path.parent == runs_dir]
    there += list(runs_dir.iterdir()) if runs_dir.is_dir() else []
    taken = [int(m[1]) for path in there if (m := pattern.fullmatch(path.name))]
    return runs_dir / f"{name}-{max(taken, default=0) + 1:04d}"


def claim(runs_dir: Path, name: str, below: Sequence[str] = (runfolder.LOGS, runfolder.ERRORS)) -> Path:
    """Make the next run folder, mode 0700, and those `below` it. Safe beside others that do the same: mkdir decides.

    Raises SubmitError where it cannot be made (read-only, full, no permission).
    """
    for _ in range(100):
        path = _free(runs_dir, name)
        try:
            ownership.make_folders(runs_dir)
            if said := ownership.of_runs_dir(runs_dir):
                raise SubmitError(said, NOTHING_SUBMITTED)
            path.mkdir(mode=PRIVATE)
            for inner in below:
                (path / inner).mkdir(mode=PRIVATE)
            _refuse_strange_owner(path, path)
            return path
        except FileExistsError:
            if not runs_dir.is_dir():
                raise SubmitError(f"runs_dir is {str(runs_dir)!r}, which is not a folder") from None
        except OSError as error:
            discard(path)
            raise cannot_write(path, error) from None
    raise SubmitError(f"100 others claimed a run folder in {runs_dir} before this one; submit again")


def make(task: str) -> None:
    """The run folder of a task, inside of its sweep's. Raises OSError."""
    for path in (task, f"{task}/{runfolder.LOGS}", f"{task}/{runfolder.ERRORS}"):
        os.mkdir(path, PRIVATE)  # noqa: PTH102 - a thousand of them: Path takes three times as long


def _refuse_strange_owner(path: Path, made: Path) -> None:
    """Raise SubmitError if what hpcinit has just made in the run folder `path` is not this user's alone: the job would
    refuse it, after its time in the queue. Some file systems choose the owner or the mode (NFS all_squash, inherited
    access lists)."""
    if said := ownership.of_path(made, "its file system chooses the owner: choose another runs_dir=..."):
        discard(path)
        raise SubmitError(f"{said}, or choose another runs_dir=...", NOTHING_SUBMITTED)


def fill(path: Path, files: Mapping[str, str]) -> None:
    """Write the files, name to text. Raises SubmitError, and then the folder is gone."""
    try:
        for name, text in files.items():
            write(f"{path}/{name}", text)
        for name in list(files)[:1]:
            _refuse_strange_owner(path, path / name)
    except OSError as error:
        discard(path)
        raise cannot_write(path, error) from None


def write(path: str, text: str) -> None:
    """Write a file that only this user can read. In four calls of the system: a sweep has thousands of files."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
    try:
        data = text.encode()
        while data:  # a disk that is almost full takes a part
            data = data[os.write(file, data) :]
    finally:
        os.close(file)


def mark_submitted(path: Path, submission: Mapping[str, object]) -> None:
    """Write submission.json whole or not at all: its presence means that the job exists."""
    whole_file.write(path / runfolder.SUBMISSION, json.dumps(submission, indent=2) + "\n", PRIVATE_FILE)


def discard(path: Path) -> None:
    """Take away a run folder that never became a job."""
    if not (path / runfolder.SUBMISSION).exists():
        shutil.rmtree(path, ignore_errors=True)


def cannot_write(path: Path, error: OSError) -> SubmitError:
    do = {
        errno.ENOSPC: "the file system is full; free some space or choose another runs_dir=...",
        errno.EDQUOT: "your quota is used up; free some space or choose another runs_dir=...",
        errno.EROFS: "the file system is read-only; choose another runs_dir=...",
        errno.EACCES: "you may not write there; choose another runs_dir=...",
    }.get(error.errno or 0, "choose another runs_dir=...")
    return SubmitError(f"cannot write the run folder {path}: {error.strerror}; {do}", NOTHING_SUBMITTED)
