"""What a rank sends to rank 0: its host and process id, and which environment it runs in."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcinit.base import versions
from hpcinit.rendezvous import protocol

LONGEST = 400  # characters shown of another rank's value
# Ranks that differ in one of these fail late and with misleading errors: two versions of NCCL cannot talk to each other
# (https://github.com/NVIDIA/nccl/issues/286).
PACKAGES = ("hpcinit", "torch", "deepspeed", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def identity() -> dict[str, Any]:
    """Return {host, pid} of this process."""
    return {"host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(), "pid": os.getpid()}


def fingerprint(folder: Path | None = None) -> dict[str, str]:
    """Return versions, the commit of the working folder and the run folder, without importing any package."""
    made_of = {"python": platform.python_version()}
    for package in PACKAGES:
        if version := versions.installed(package):
            made_of[package] = version
    if head := commit(Path.cwd()):
        made_of["commit"] = head
    if folder is not None:
        made_of["run"] = str(folder)
    return made_of


def differences(mine: Mapping[str, str], theirs: Mapping[str, Any]) -> list[str]:
    """Return 'torch 2.12.0 (rank 0 has 2.13.0)' for each key whose value in `theirs` differs from `mine`, rank 0's.

    theirs: sent by another rank, so of any type and length.
    """
    return [
        f"{protocol.cut(key, LONGEST)} {protocol.cut(str(theirs.get(key, 'none')), LONGEST)} "
        f"(rank 0 has {mine.get(key, 'none')})"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    ]


def commit(folder: Path) -> str:
    """Return the commit that is checked out in `folder` or above it, or ''. It takes two small reads and no process."""
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
