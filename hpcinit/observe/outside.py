"""What hpcinit wrote outside of run folders, for `hpcinit clean --outside`.

Invariant: nothing that a job or a process of this user may use is removed, and nothing that hpcinit did not write: with
XDG_CACHE_HOME=/scratch/me, ~/.cache/hpcinit may be a checkout. A job in the queue may load an op from the
cache, and a process may use a folder on this machine's disk. So the cache stays while this user has a job in the queue,
and while Slurm does not answer. This machine's folder stays while any folder in it is locked.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.base.text import home
from hpcinit.records import node_records, scratch
from hpcinit.slurm import tokens
from hpcinit.slurm.slurm_client import Unreachable

REMOVED = re.compile(r"\..+\.removed-\d+")  # observe/clean.py renames a run folder to this before it removes it


@dataclass(frozen=True)
class Place:
    """A folder that hpcinit wrote. kept: why it is not removed, or ''."""

    path: Path
    what: str
    kept: str = ""


def places(runs_dir: Path, env: Mapping[str, str]) -> list[Place]:
    """Return the existing places with this user's files, from this machine's view."""
    found = [*_node_disks(env), *_homes(env), *_interrupted(runs_dir)]
    return [one for one in dict.fromkeys(found) if safe_files.is_own(one.path, folder=True)]


def _node_disks(env: Mapping[str, str]) -> Iterator[Place]:
    for parent in scratch.parents(env):
        path = scratch.of_user(parent)
        if path.is_absolute() and safe_files.is_own(path, folder=True):
            used = next((one for one in path.iterdir() if scratch.in_use(one)), None)
            kept = f"a process uses {used}" if used else ""
            yield Place(path, "caches of jobs on this machine, compiled kernels", kept)


def _homes(env: Mapping[str, str]) -> Iterator[Place]:
    ops = Path(env.get("XDG_CACHE_HOME") or home() / ".cache") / "hpcinit/ops"
    if ops.is_dir():
        yield Place(ops, "compiled DeepSpeed ops, for all machines with this home folder", _why_in_use())
    yield Place(node_records.folder(env), "nodes that failed, and those added with hpcinit nodes --add")


def _why_in_use() -> str:
    """Return why a job may use the cache, or ''."""
    if shutil.which("squeue") is None:
        return ""
    try:
        jobs = tokens.own_jobs(os.environ, ended=False).jobs()
    except Unreachable as error:
        return f"jobs may use it, and Slurm does not answer: {error}"
    # Any job of this user: a site may replace the comment, and a script may call hpcinit.init() without `submit`.
    return next((f"job {job.base_id} is in the queue and may use it" for job in jobs if not job.over), "")


def _interrupted(runs_dir: Path) -> Iterator[Place]:
    if runs_dir.is_dir():
        for name in sorted(os.listdir(runs_dir)):  # noqa: PTH208 - names of a thousand folders
            if REMOVED.fullmatch(name):
                yield Place(runs_dir.absolute() / name, "a run whose removal was interrupted")
