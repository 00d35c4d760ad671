"""What a rank sends to rank 0: who it is, and which environment it runs in."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcinit.base import versions
from hpcinit.rendezvous import protocol

# Ranks that differ in one of these fail late and strangely: NCCL of two versions does not talk to itself
# (https://github.com/NVIDIA/nccl/issues/286).
LONGEST = 400  # characters of a value of another rank that are shown
PACKAGES = ("hpcinit", "torch", "deepspeed", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def identity() -> dict[str, Any]:
    """{host, pid} of this process."""
    return {"host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(), "pid": os.getpid()}


def fingerprint(folder: Path | None = None) -> dict[str, str]:
    """Versions, the commit of the working folder, and the submission's config; without importing any of them."""
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
    """'torch 2.12.0 instead of 2.13.0' for each key in which `theirs` is not `mine`.

    theirs: what another rank sent, so of any type and length.
    """
    return [
        f"{protocol.cut(key, LONGEST)} {protocol.cut(str(theirs.get(key, 'absent')), LONGEST)} "
        f"instead of {mine.get(key, 'absent')}"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    ]


def commit(folder: Path) -> str:
    """The commit that is checked out where `folder` lies, or ''. Two small reads, no process per rank."""
    for place in (folder, *folder.parents):
        try:
            head = (place / ".git/HEAD").read_text().strip()
        except OSError:
            continue
        if not head.startswith("ref: "):
            return head
        return _reference(place / ".git", head.removeprefix("ref: "))
    return ""


def _reference(git: Path, name: str) -> str:
    try:
        return (git / name).read_text().strip()
    except OSError:
        pass
    try:
        packed = (git / "packed-refs").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
