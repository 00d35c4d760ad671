"""Records the failures of each node. There is one file per cluster, with one line of JSON per failure.

hpcinit only appends lines, so two submissions can write at the same time without a lock. If they overwrite each other's
line (O_APPEND over NFS), a reader skips the damaged line. To clear the history of a node, hpcinit appends a line of the
kind FORGOTTEN: earlier failures of this node then no longer count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.base.text import home
from hpcinit.records import run_folder

FOLDER = "hpcinit/nodes"  # below XDG_STATE_HOME or ~/.local/state, which the login nodes of a site share
LIMIT, EXPIRY_H = 2, 24.0  # defaults of excluded_nodes.limit and excluded_nodes.expiry_h
ADDED = "added"  # kind of a line written by `hpcinit nodes --add`
DOCTOR = "doctor"  # ... and by `hpcinit doctor --remember`
AT_ONCE = {ADDED: "added manually", DOCTOR: "found by hpcinit doctor"}  # one such line excludes the node
FORGOTTEN = "forgotten"
KINDS_SHOWN = 4
# Xid errors that a faulty GPU or link causes: https://docs.nvidia.com/deploy/xid-errors. A wrong address in a program
# causes 13, 31, 43 and 45. Xid 63 reports that a faulty memory row was replaced in time.
DEVICE_XIDS = {46, 48, 62, 64, 74, 79, 94, 95, 119, 120, 140}


@dataclass(frozen=True)
class NodeFailure:
    """One failure of a node.

    time: seconds since 1970, by the clock of the file system.
    kind: 'NODE_FAIL', 'Xid 79', 'ECC', ...
    run: the folder of the run in which the node failed.
    about: Slurm's reason, the first line of the error, or the reason that the user gave with --why.
    """

    time: float
    host: str
    kind: str
    run: str = ""
    job: str = ""
    about: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what identifies this failure. Failures with the same node, job and kind count as one."""
        return (self.host, self.kind, self.job)


@dataclass(frozen=True)
class NodeHistory:
    """A node and its failures that have not expired, oldest first."""

    host: str
    failures: tuple[NodeFailure, ...]

    def is_bad(self, limit: int) -> bool:
        return self.until(limit, 0) is not None

    def until(self, limit: int, expiry_h: float) -> float | None:
        """Return when the exclusion of the node ends, in seconds since 1970, or None if the node is not excluded."""
        times = [one.time for one in self.failures if one.kind in AT_ONCE]
        if len(self.failures) >= limit:
            times.append(self.failures[-limit].time)  # after this failure expires, fewer than `limit` remain
        return max(times) + expiry_h * 3600 if times else None

    def summary(self, expiry_h: float, why: bool = True) -> str:
        """Return the failures in one line, such as '2 failures in 24 h: NODE_FAIL, Xid 79'.

        why: whether to add the reason for which the user or `hpcinit doctor` excluded the node.
        """
        seen = [one for one in self.failures if one.kind not in AT_ONCE]
        kinds = list(dict.fromkeys(one.kind for one in seen))
        more = [f"and {len(kinds) - KINDS_SHOWN} more"] * (len(kinds) > KINDS_SHOWN)
        added = [one for one in self.failures if one.kind in AT_ONCE]
        parts = [AT_ONCE[one.kind] + f": {one.about or 'no reason given'}" * why for one in added][-1:]
        if seen:
            count = f"{len(seen)} failure{'s' * (len(seen) > 1)}"
            parts.append(f"{count} in {expiry_h:g} h: {', '.join([*kinds[:KINDS_SHOWN], *more])}")
        return "; ".join(parts)


def folder(env: Mapping[str, str]) -> Path:
    """Return the folder that contains the record files of all clusters.

    If XDG_STATE_HOME is a relative path, it is ignored, as its specification requires.
    """
    own = env.get("XDG_STATE_HOME", "")
    return (Path(own) if own.startswith("/") else home() / ".local/state") / FOLDER


def file(env: Mapping[str, str], cluster: str) -> Path:
    return folder(env) / f"{re.sub(r'[^A-Za-z0-9._-]', '_', cluster)}.jsonl"


def read(path: Path) -> list[NodeFailure]:
    """Return the failures in the file, or an empty list if the file does not exist. Unreadable lines are skipped."""
    return [one for one in run_folder.read_lines(NodeFailure, path) if one.time >= 0]


def append(path: Path, found: Iterable[NodeFailure]) -> None:
    """Append the failures to the file, and create it if necessary. Raise OSError if that is not possible."""
    lines = "".join(json.dumps(asdict(one)) + "\n" for one in found)
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    safe_files.append(path, lines)


def new_record(found: Iterable[NodeFailure], known: Sequence[NodeFailure]) -> list[NodeFailure]:
    """Return the failures in `found` that are not in the file yet.

    The file still contains failures that the user cleared, so they are not added again.

    known: the failures in the file.
    """
    keys = {one.key for one in known}
    fresh = {one.key: one for one in found if one.key not in keys}
    return list(fresh.values())


def node_states(known: Iterable[NodeFailure], now: float, expiry_h: float) -> list[NodeHistory]:
    """Return the nodes with failures that have not expired at the time `now` and were not cleared, worst node first."""
    known = list(known)
    since = {one.host: now - expiry_h * 3600 for one in known}
    for one in known:
        if one.kind == FORGOTTEN:
            since[one.host] = max(since[one.host], one.time)
    found: dict[str, dict[tuple[str, str, str], NodeFailure]] = {}
    for one in sorted(known, key=lambda one: one.time):
        if one.kind != FORGOTTEN and one.time > since[one.host]:
            found.setdefault(one.host, {}).setdefault(one.key, one)
    all_of_them = [NodeHistory(host, tuple(lines.values())) for host, lines in found.items()]
    return sorted(all_of_them, key=_badness)


def _badness(one: NodeHistory) -> tuple[bool, int, float]:
    added = any(failure.kind in AT_ONCE for failure in one.failures)
    return (not added, -len(one.failures), -one.failures[-1].time)
