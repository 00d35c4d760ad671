"""Plans code snapshots (snapshot=git): finds the files to copy from the git checkout, or why they can't be copied.

hpcinit calls git instead of reading git's files, because only git handles worktrees, sparse checkouts and the user's
own exclude rules.
"""

from __future__ import annotations

import fnmatch
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from hpcinit.base import console
from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted
from hpcinit.config import job_spec
from hpcinit.config.schema import Config
from hpcinit.records import run_folder, run_numbers

GIT_S = 120  # to list or compare the files of a large checkout on a slow file system


def checkout_root(workdir: Path) -> Path:
    """Return the top folder of the git checkout that contains `workdir`. Raise RequestError if there is none."""
    done = _git(workdir, "rev-parse", "--show-toplevel")
    if done.returncode:
        problem = _git_error(done)
        if "not a git repository" in problem:
            problem = f"{workdir} is not in a git repository; create one with git init"
        raise RequestError(f"snapshot=git: {problem}. To run the files in place, set snapshot=none")
    return Path(os.fsdecode(done.stdout.removesuffix(b"\n")))


def checkout_commit(top: Path) -> str | None:
    """Return the id of the commit that is checked out, or None if there is no commit yet."""
    done = _git(top, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    return os.fsdecode(done.stdout).strip() or None


def checkout_files(top: Path) -> Iterator[str]:
    """Yield the tracked files, and the untracked files that git does not ignore, as paths relative to `top`.

    Files in submodules and nested repositories are included. Deleted files are not.
    """
    for name in _names(top, "--cached", "--others"):
        path = top / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or a nested repository: 'nested/'
            if (path / ".git").exists():
                yield from (os.path.join(name, inner) for inner in checkout_files(path))  # noqa: PTH118 - names, not paths
        elif os.path.lexists(path):
            yield name


def untracked(top: Path) -> list[str]:
    return sorted(_names(top, "--others"))


def checkout_diff(top: Path) -> bytes:
    """Return the uncommitted changes to tracked files as a diff, including submodules.

    The diff is empty if there is no commit yet.
    """
    options = ("--no-ext-diff", "--no-color", "--no-textconv", "--submodule=diff")
    return _git(top, "-c", "core.quotePath=false", "diff", *options, "HEAD").stdout


def _names(top: Path, *which: str) -> set[str]:
    done = _git(top, "ls-files", "-z", *which, "--exclude-standard")
    if done.returncode:
        raise RequestError(f"snapshot=git: git ls-files failed in {top}: {_git_error(done)}")
    return {os.fsdecode(name) for name in done.stdout.split(b"\0") if name}


def _git_error(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode(errors="replace").strip().removeprefix("fatal: ") or f"exit status {done.returncode}"


def _git(place: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    # In a hook or in `git rebase --exec`, GIT_DIR and GIT_INDEX_FILE name another checkout.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    command = ["git", "-C", str(place), *arguments]
    started = console.started(command)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=GIT_S, check=False
        )
    except FileNotFoundError:
        raise RequestError("snapshot=git: git is not on PATH; load its module, or use snapshot=none") from None
    except subprocess.TimeoutExpired:
        raise RequestError(f"snapshot=git: git {arguments[0]} in {place} took more than {GIT_S} s") from None
    console.ended(command, time.monotonic() - started, done.returncode)
    return done


MB = 10**6
LARGEST_SHOWN = 5  # files in the error about a snapshot that is too large


@dataclass(frozen=True)
class SnapshotPlan:
    """What a code snapshot will contain.

    root: the checkout, with links resolved.
    workdir: the program's working folder.
    files: the files, relative to root.
    size: their total size in bytes.
    contents: the files and all their parent folders.
    before: the record of the earlier snapshot, if root is itself a run's snapshot.
    """

    root: Path
    workdir: Path
    files: tuple[str, ...]
    size: int
    contents: frozenset[str] = field(repr=False)
    before: Mapping[str, Any] = field(default_factory=dict)

    def place(self, folder: Path, path: Path | None = None) -> Path:
        """Return the path of the copy of `path` in the snapshot, or `path` itself if it is outside the checkout.

        folder: the run folder that contains the snapshot.
        path: the path to find in the snapshot; by default the working folder.
        """
        inside = (path or self.workdir).resolve()
        return folder / run_folder.CODE / inside.relative_to(self.root) if inside.is_relative_to(self.root) else inside

    def target(self, folder: Path, target: str) -> str:
        """Return the program that the job runs. For an absolute path in the checkout, return the path of its copy."""
        return str(self.place(folder, Path(target))) if os.path.isabs(target) else target  # noqa: PTH117

    def python_path(self, folder: Path) -> list[str]:
        """Return the folders of the snapshot for the job's PYTHONPATH.

        These are the snapshot's root, its folder src, and the copies of folders from which this Python imports.
        """
        places = [Path(entry or ".").resolve() for entry in sys.path]
        # An editable install by setuptools adds a finder instead of a path. Its table maps packages to folders.
        tables = [getattr(m, "MAPPING", {}) for name, m in sys.modules.items() if name.startswith("__editable__")]
        places += [Path(place).parent for table in tables for place in table.values()]
        places += [self.root / "src", self.root]
        relative = (os.path.relpath(place, self.root) for place in places if place.is_relative_to(self.root))
        kept = [name for name in dict.fromkeys(relative) if name == "." or name in self.contents]
        return [os.path.normpath(folder / run_folder.CODE / name) for name in kept]


def plan_snapshot(config: Config, workdir: Path) -> SnapshotPlan | None:
    """Return the plan of this request's snapshot, or None if snapshot=git is not set. The result is cached.

    Raise RequestError if `workdir` is not in a checkout, or if the files are too large.
    """
    if config.snapshot != "git":
        return None
    if taken := _taken_before(workdir.resolve()):
        return taken
    return _plan(workdir.resolve(), tuple(config.snapshot_exclude), config.snapshot_max_mb)


def _taken_before(workdir: Path) -> SnapshotPlan | None:
    """Return a plan that copies another run's snapshot, if `workdir` is in one. Otherwise return None."""
    inside = [place for place in (workdir, *workdir.parents) if place.name == run_folder.CODE]
    for code in inside:
        try:
            names = json.loads((code.parent / run_folder.CODE_FILES).read_text())
            sizes = [(code / name).lstat().st_size for name in names]
        except (OSError, ValueError):
            continue
        parents = {str(parent) for name in names for parent in PurePosixPath(name).parents}
        return SnapshotPlan(
            code, workdir, tuple(names), sum(sizes), frozenset({*names, *parents}), _record(code.parent)
        )
    return None


def _record(run: Path) -> dict[str, Any]:
    """Return the record of the snapshot in the run's provenance.json, or {}."""
    document: dict[str, Any] = json.loads((run / run_folder.PROVENANCE).read_text())
    return dict(document.get("snapshot", {}))


@cache
def _plan(workdir: Path, exclude: tuple[str, ...], max_mb: float) -> SnapshotPlan:
    root = checkout_root(workdir)
    names, sizes, folders = [], [], dict[Path, bool]()
    for name in sorted(checkout_files(root)):
        info = (root / name).lstat()
        kind = stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)
        if run_numbers.is_mark(name):
            continue
        if kind and not _excluded(name, exclude) and not _is_in_run_folder((root / name).parent, root, folders):
            names.append(name)
            sizes.append(info.st_size)
    if sum(sizes) > max_mb * MB:
        raise RequestError(_too_large(names, sizes, max_mb))
    parents = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    return SnapshotPlan(root, workdir, tuple(names), sum(sizes), frozenset({*names, *parents}))


def _excluded(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns matches the file `name`.

    - 'data' excludes all files and folders of that name.
    - '/data' and 'a/b' exclude only that path.
    - '*.bin' and 'a/*.bin' are globs.
    """
    places = [PurePosixPath(name), *PurePosixPath(name).parents][:-1]
    for pattern in (pattern.rstrip("/") for pattern in patterns):
        found = (str(place) if "/" in pattern else place.name for place in places)
        if any(fnmatch.fnmatchcase(text, pattern.lstrip("/")) for text in found):
            return True
    return False


def _is_in_run_folder(folder: Path, root: Path, known: dict[Path, bool]) -> bool:
    """Return whether `folder` is a run folder or inside one, in any runs_dir. Snapshots do not contain run folders.

    known: a cache of the results by folder. This function adds to it.
    """
    if folder not in known:
        here = (folder / run_folder.SPEC).is_file() and (folder / run_folder.SCRIPT).is_file()
        known[folder] = here or (folder != root and _is_in_run_folder(folder.parent, root, known))
    return known[folder]


def _too_large(names: Sequence[str], sizes: Sequence[int], max_mb: float) -> str:
    largest = sorted(zip(sizes, names, strict=True), reverse=True)[:LARGEST_SHOWN]
    lines = "\n".join(f"  {size / MB:8.1f} MB  {name!r}" for size, name in largest)
    return (
        f"snapshot=git: {counted(len(names), 'file')} with {sum(sizes) / MB:.1f} MB in total, expected at most "
        f"snapshot_max_mb={max_mb:g}; the largest:\n{lines}\n"
        "add data files to .gitignore or to snapshot_exclude=[...], or raise snapshot_max_mb"
    )


def problems(config: Config) -> Iterator[str]:
    """Yield why a snapshot is impossible, or why it would not contain the program."""
    workdir = job_spec.workdir(config)
    try:
        plan = plan_snapshot(config, workdir)
    except RequestError as error:
        yield str(error)
        return
    program = config.job.script or (config.job.command if "/" in (config.job.command or "") else None)
    path = (workdir / (program or ".")).resolve()
    if plan and program and path.is_relative_to(plan.root) and str(path.relative_to(plan.root)) not in plan.contents:
        yield f"the snapshot would not contain the program {program!r}: git or snapshot_exclude ignores {path}"
