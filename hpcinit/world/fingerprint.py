"""Finds out what a rank runs (versions, commit and run folder) from files, without importing any package."""

from __future__ import annotations

import platform
from pathlib import Path

from hpcinit.base import versions

# Ranks that differ in one of these fail late and with misleading errors: two versions of NCCL cannot talk to each other
# (https://github.com/NVIDIA/nccl/issues/286).
PACKAGES = ("hpcinit", "torch", "deepspeed", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def fingerprint(folder: Path | None = None) -> dict[str, str]:
    """Return what this rank runs: versions, the commit of the working folder, and the run folder."""
    made_of = {"python": platform.python_version()}
    for package in PACKAGES:
        if version := versions.installed(package):
            made_of[package] = version
    if head := commit(Path.cwd()):
        made_of["commit"] = head
    if folder is not None:
        made_of["run"] = str(folder)
    return made_of


def commit(folder: Path) -> str:
    """Return the git commit that is checked out in `folder` or in a folder above it, or ''.

    The function reads two small files and does not run git.
    """
    for place in (folder, *folder.parents):
        try:
            head = (place / ".git/HEAD").read_text().strip()
        except OSError:
            continue
        if not head.startswith("ref: "):
            return head
        return _commit_of_branch(place / ".git", head.removeprefix("ref: "))
    return ""


def _commit_of_branch(git: Path, name: str) -> str:
    try:
        return (git / name).read_text().strip()
    except OSError:
        pass
    try:
        packed = (git / "packed-refs").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
