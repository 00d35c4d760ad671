"""Finds and removes what hpcinit wrote outside of run folders, for `hpcinit clean --outside` and `--all`.

The module removes only what hpcinit wrote, and nothing that a job or a process of this user may be using:
- The cache of compiled ops stays while this user has a job in the queue, and while Slurm does not answer, because a job
  may load an op later.
- A folder on this machine's disk stays while a process has locked it.

A process may start between the check and the removal, so a folder is renamed, checked again, and then removed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.base.text import home
from hpcinit.records import node_records, safeguards, scratch
from hpcinit.slurm import tokens
from hpcinit.slurm.slurm_client import Unreachable

REMOVED = re.compile(r"\..+\.hpcinit-removed-\d+")  # see hidden()


def hidden(folder: Path) -> Path:
    """Return the name to give a folder before removing it, so that a half-removed folder doesn't look complete."""
    return folder.with_name(f".{folder.name}.hpcinit-removed-{os.getpid()}")


def _unused() -> str:
    return ""


@dataclass(frozen=True)
class Place:
    """A folder that hpcinit wrote.

    what: what the folder contains.
    why_kept: a function that returns why the folder must not be removed now, or ''.
    disk: whether the folder is on this machine's own disk and contains files of jobs.
    """

    path: Path
    what: str
    why_kept: Callable[[], str] = _unused
    disk: bool = False


def places(runs_dir: Path, env: Mapping[str, str]) -> list[Place]:
    """Return the folders outside of run folders that hpcinit wrote for this user and that this machine can access."""
    found = [*_node_disks(env), *_homes(env), *_interrupted(runs_dir, "a run whose removal was interrupted")]
    return [one for one in found if safe_files.is_own(one.path, folder=True)]


def remove(place: Place) -> str:
    """Remove what hpcinit wrote in the folder `place`. Return why the folder was kept, or ''.

    Raise OSError if a folder can't be removed.
    """
    if place.disk:
        scratch.sweep(place.path, kernels=True)  # keeps the folders that a process has locked
        dumps = place.path / safeguards.FLIGHT
        left = next((one for one in place.path.iterdir() if one != dumps), None)
        if why := place.why_kept() or (f"{left} belongs to another host" if left else ""):
            return why
        return remove(replace(place, path=dumps, disk=False)) if dumps.is_dir() else ""
    if why := place.why_kept():
        return why
    aside = place.path.rename(hidden(place.path))
    try:
        why = place.why_kept()
    except BaseException:  # Ctrl-C while Slurm is queried: a job that needs the folder must find it
        aside.rename(place.path)
        raise
    if why:
        aside.rename(place.path)
        return why
    shutil.rmtree(aside)
    return ""


def _node_disks(env: Mapping[str, str]) -> Iterator[Place]:
    for parent in dict.fromkeys(scratch.parents(env)):
        path = scratch.of_user(parent)
        if path.is_absolute() and safe_files.is_own(path, folder=True) and any(path.iterdir()):
            yield Place(path, "caches of jobs on this machine, compiled kernels", partial(_locked, path), disk=True)


def _locked(path: Path) -> str:
    used = next((one for one in path.iterdir() if scratch.in_use(one)), None)
    return f"a process uses {used}" if used else ""


def _homes(env: Mapping[str, str]) -> Iterator[Place]:
    ops = Path(env.get("XDG_CACHE_HOME") or home() / ".cache") / "hpcinit/ops"
    nodes = node_records.folder(env)
    in_use = partial(_why_in_use, ops)
    yield Place(ops, "compiled DeepSpeed ops, for all machines with this home folder", in_use)
    yield Place(nodes, "nodes that failed, and those added with hpcinit nodes --add")
    # Another `hpcinit clean` may be about to rename the folder of ops back.
    yield from _interrupted(ops.parent, "left by an interrupted removal", in_use)
    yield from _interrupted(nodes.parent, "left by an interrupted removal")


def _why_in_use(ops: Path) -> str:
    if shutil.which("squeue") is None:
        return (
            "squeue is not on PATH, so hpcinit cannot check whether jobs use this folder; to remove it anyway: "
            f"rm -r {shlex.quote(str(ops))}"
        )
    try:
        jobs = tokens.own_jobs(os.environ, ended=False).jobs()
    except Unreachable as error:
        return f"jobs may use it, and Slurm does not answer: {error}"
    # Any job of this user: a site may replace the comment, and a script may call hpcinit.init() without `submit`.
    return next((f"job {job.base_id} is in the queue and may use it" for job in jobs if not job.over), "")


def _interrupted(folder: Path, what: str, why_kept: Callable[[], str] = _unused) -> Iterator[Place]:
    if folder.is_dir():
        for name in sorted(os.listdir(folder)):  # noqa: PTH208 - names of a thousand folders
            if REMOVED.fullmatch(name):
                yield Place(folder.absolute() / name, what, why_kept)
