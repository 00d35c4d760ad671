"""What git says of a checkout: its root, its commit, and the files that are tracked or would be.

Only git itself is asked, never its files: worktrees, sparse checkouts and a user's own excludes are its business.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from hpcinit.facts import telling
from hpcinit.facts.errors import RequestError

GIT_S = 120  # to list or compare the files of a large checkout on a slow file system


def root(workdir: Path) -> Path:
    """The top folder of the checkout that `workdir` is in. Raises RequestError."""
    done = _git(workdir, "rev-parse", "--show-toplevel")
    if done.returncode:
        said = _said(done)
        if "not a git repository" in said:
            said = f"{workdir} is in no git repository"
        raise RequestError(f"snapshot=git: {said}; git init makes one, snapshot=none runs from the folder itself")
    return Path(os.fsdecode(done.stdout.removesuffix(b"\n")))


def commit(top: Path) -> str | None:
    """The commit that is checked out; None before the first."""
    done = _git(top, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    return os.fsdecode(done.stdout).strip() or None


def files(top: Path) -> Iterator[str]:
    """Tracked files, and those that are neither tracked nor ignored, as they lie on the disk, relative to `top`.

    Those of submodules and of repositories inside too; what was deleted is not there any more.
    """
    for name in _names(top, "--cached", "--others"):
        path = top / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or 'nested/', a repository that is none
            if (path / ".git").exists():
                yield from (os.path.join(name, inner) for inner in files(path))  # noqa: PTH118 - names, not paths
        elif os.path.lexists(path):
            yield name


def untracked(top: Path) -> list[str]:
    return sorted(_names(top, "--others"))


def diff(top: Path) -> bytes:
    """What is not committed in tracked files, submodules included; nothing before the first commit."""
    options = ("--no-ext-diff", "--no-color", "--no-textconv", "--submodule=diff")
    return _git(top, "-c", "core.quotePath=false", "diff", *options, "HEAD").stdout


def _names(top: Path, *which: str) -> set[str]:
    done = _git(top, "ls-files", "-z", *which, "--exclude-standard")
    if done.returncode:
        raise RequestError(f"snapshot=git: git ls-files in {top}: {_said(done)}")
    return {os.fsdecode(name) for name in done.stdout.split(b"\0") if name}


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode(errors="replace").strip().removeprefix("fatal: ") or f"exit status {done.returncode}"


def _git(place: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    # Started from a hook or from `git rebase --exec`, GIT_DIR and GIT_INDEX_FILE name another checkout.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    command = ["git", "-C", str(place), *words]
    started = telling.started(command)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=GIT_S, check=False
        )
    except FileNotFoundError:
        raise RequestError("snapshot=git: git is not on PATH; load its module, or say snapshot=none") from None
    except subprocess.TimeoutExpired:
        raise RequestError(f"snapshot=git: git {words[0]} in {place} took more than {GIT_S} s") from None
    telling.ended(command, time.monotonic() - started, done.returncode)
    return done
