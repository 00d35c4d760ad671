"""Manages the folders of a drill, and finds which files the program writes and reads in them.

    ROOT/now/work           the program's working folder, at first a copy of the current folder.
    ROOT/now/runs/NAME      the run folder.
    ROOT/before             copies of both, made before the first start.
    ROOT/attempt-3          the reports of one attempt's ranks, and the attempt's TMPDIR.

The access times of files show which files an attempt has read, for a program in any language. Most file systems update
an access time only if it is not later than the file's last change (relatime). So the drill sets all access times to
1970 before each start. A later access time means that the file was read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.records import drill_records, run_folder

MOST_GB = 2.0  # the largest size of the user's folder, which is copied
OMITTED = {"runs", "__pycache__", "node_modules", "venv"}  # and hidden folders
# Folders and files that hpcinit writes into a run folder. All other files are from the program.
OWN_FOLDERS = {"logs", "timeline", "errors", "hang", "flight", "nccl", "unusable", "heartbeats"}
OWN_FILES = {value for name, value in vars(run_folder).items() if name.isupper() and isinstance(value, str)} | {
    "local.json"
}
SAVED_OF_RUN = (run_folder.SPEC, run_folder.CONFIG, run_folder.SCRIPT, run_folder.PROVENANCE, run_folder.SUBMISSION)


@dataclass(frozen=True)
class Seen:
    """The size of a file and its modification time in nanoseconds."""

    size: int
    changed_ns: int


class Place:
    """The folders of one drill. Call `remove()` at the end."""

    def __init__(self, source: Path, without: Sequence[str] = ()) -> None:
        """Copy the user's folder `source`. Raise RequestError if it is too large.

        without: names of files and folders that are not copied.
        """
        files = [path for path in _files(source, {*OMITTED, *without}) if path.name not in without]
        size = sum(path.lstat().st_size for path in files)
        if size > MOST_GB * 1e9:
            raise RequestError(
                f"{source} has {size / 1e9:.1f} GB, but a drill copies at most {MOST_GB:g} GB: exclude the data with "
                "--without NAME, and pass the absolute path of the data to the program"
            )
        self.root = Path(tempfile.mkdtemp(prefix="hpcinit-drill-")).resolve()
        self.now, self.work, self.before = self.root / "now", self.root / "now/work", self.root / "before"
        self.attempts = 0
        self.work.mkdir(parents=True)
        for path in files:
            target = self.work / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
        self.given = self.written()
        self.reads_visible = self._sees_reads()

    def keep_as_before(self, run: Path) -> None:
        """Copy the working folder and the run folder `run`, which was just submitted. restore() uses the copies."""
        shutil.copytree(self.work, self.before / "work", symlinks=True)
        kept = self.before / run.relative_to(self.now)
        (kept / run_folder.LOGS).mkdir(parents=True)
        for name in SAVED_OF_RUN:
            shutil.copy2(run / name, kept / name)

    def restore(self, state: Path | None = None) -> None:
        """Restore the folders from `state`, which copy_state() returned.

        If it is None, restore the folders as they were before the first start.
        """
        shutil.rmtree(self.now)
        _copy(state or self.before, self.now)

    def copy_state(self, name: str) -> Path:
        """Return a copy of all folders as they are now."""
        target = self.root / name
        _copy(self.now, target)
        return target

    def next_attempt(self) -> Path:
        """Return a new folder for the reports of the next attempt. It contains the attempt's TMPDIR."""
        self.attempts += 1
        folder = self.root / f"attempt-{self.attempts}"
        (folder / "tmp").mkdir(parents=True)
        return folder

    def written(self) -> dict[str, Seen]:
        """Return all files in the working folder and in the run folder, except hpcinit's own files."""
        found: dict[str, Seen] = {}
        for path, entry in _entries(self.now):
            if self.is_own(path):
                continue
            with contextlib.suppress(OSError):  # it was removed or renamed
                status = entry.stat(follow_symlinks=False)
                found[str(path)] = Seen(status.st_size, status.st_mtime_ns)
        return found

    def is_own(self, name: str | Path) -> bool:
        """Return whether hpcinit itself writes the file `name`, which is relative to `now`."""
        parts = Path(name).parts
        return len(parts) > 2 and parts[0] == "runs" and (parts[2] in OWN_FOLDERS or _is_own(parts[2]))

    def forget_reads(self) -> None:
        """Set the access times of all files to 1970."""
        _touch(((self.now / name, self.now / name) for name in self.written()), atime_ns=0)

    def read_since(self) -> list[str]:
        """Return the files that were read since forget_reads(), in the order in which they were read."""
        times: dict[str, int] = {}
        for name in self.written():
            with contextlib.suppress(OSError):
                if at := (self.now / name).stat(follow_symlinks=False).st_atime_ns:
                    times[name] = at
        return sorted(times, key=lambda name: times[name])

    def remove_outside(self) -> None:
        """Remove the files and folders that the ranks created in node-local folders. Keep everything else there."""
        for name in sorted(drill_records.created_outside(self.root), reverse=True):  # a file before its folder
            path = Path(name)
            with contextlib.suppress(OSError):  # removed by the program, or a folder with files of another process
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()

    def remove(self) -> None:
        """Remove all folders of the drill, and what the ranks created in node-local folders."""
        self.remove_outside()
        for _ in range(20):  # a process that is just ending may still create a file
            shutil.rmtree(self.root, ignore_errors=True)
            if not self.root.exists():
                return
            time.sleep(0.1)

    def _sees_reads(self) -> bool:
        probe = self.root / "probe"
        probe.write_text("x")
        os.utime(probe, ns=(0, probe.stat().st_mtime_ns))
        probe.read_text()
        return probe.stat().st_atime_ns > 0


def _copy(source: Path, target: Path) -> None:
    """Copy a folder with its times. A program may look for its newest checkpoint by the change time (ctime)."""
    shutil.copytree(source, target, symlinks=True)
    _touch((path, target / path.relative_to(source)) for path in source.rglob("*"))


def _touch(paths: Iterable[tuple[Path, Path]], atime_ns: int | None = None) -> None:
    """Copy the times of files to other files. Change times cannot be set, so only their order is kept.

    paths: pairs of a file and its copy.
    atime_ns: the access time to set. None: copy it, too.
    """
    found = []
    for path, target in paths:
        with contextlib.suppress(OSError):  # it was removed meanwhile
            found.append((path.lstat(), target))
    was = now = 0
    for seen, target in sorted(found, key=lambda one: one[0].st_ctime_ns):
        times = seen.st_atime_ns if atime_ns is None else atime_ns, seen.st_mtime_ns
        with contextlib.suppress(OSError):
            os.utime(target, ns=times, follow_symlinks=False)
            while seen.st_ctime_ns > was and target.lstat().st_ctime_ns <= now:  # the clock has not ticked yet
                time.sleep(0.001)
                os.utime(target, ns=times, follow_symlinks=False)
            was, now = seen.st_ctime_ns, target.lstat().st_ctime_ns


def _is_own(name: str) -> bool:
    """Return whether hpcinit writes a file of this name, or a temporary file for it, into a run folder."""
    return name in OWN_FILES or (name.endswith(".tmp") and name.startswith(tuple(f"{own}." for own in OWN_FILES)))


def leftover(folder: Path) -> dict[str, int]:
    """Return the files in an attempt's TMPDIR, with their sizes. folder: the folder of the attempt."""
    return {
        str(path): entry.stat(follow_symlinks=False).st_size
        for path, entry in _entries(folder / "tmp")
        if not path.parts[0].startswith("hpcinit-")  # heartbeats and so on, which hpcinit itself writes
    }


def changes(before: Mapping[str, Seen], after: Mapping[str, Seen]) -> dict[str, Seen]:
    """Return the files that are new or changed."""
    return {name: seen for name, seen in after.items() if before.get(name) != seen}


def _entries(folder: Path) -> Iterator[tuple[Path, os.DirEntry[str]]]:
    """Yield the files below a folder, with their relative paths. Skip files that disappear meanwhile."""
    waiting = [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        waiting.append(Path(entry.path))
                else:
                    yield Path(entry.path).relative_to(folder), entry


def _files(source: Path, omitted: Container[str]) -> Iterator[Path]:
    """Yield the files of the user's folder that a program may need.

    omitted: names of folders to skip. Hidden folders and virtual environments are skipped too.
    """
    for at, folders, files in os.walk(source):
        folders[:] = [
            one
            for one in folders
            if not one.startswith(".") and one not in omitted and not Path(at, one, "pyvenv.cfg").exists()
        ]
        yield from (Path(at) / name for name in files)
        yield from (Path(at) / name for name in folders if Path(at, name).is_symlink())
