"""Records each restart of a run by a requeue in restarts.jsonl in the run folder, one line per restart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.records import run_folder


@dataclass(frozen=True)
class Restart:
    """One restart of a run after a requeue.

    restart: the number of the attempt that starts.
    reason: why the previous attempt ended.
    step: the last training step that any previous attempt reached, or None.
    without_progress: how many consecutive restarts, including this one, did not get beyond this step.
    max_restarts: how many restarts the job may have, or None for no limit.
    """

    job: str
    restart: int
    time: float
    reason: str
    step: int | None = None
    without_progress: int = 0
    max_restarts: int | None = None


def attempt(env: Mapping[str, str]) -> str:
    """Return the name of this attempt of the job, JOB.RESTART, as in 43.0."""
    return f"{env['SLURM_JOB_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"


def record_unusable(folder: Path, node: str, env: Mapping[str, str]) -> None:
    """Record that this attempt of the job cannot use a node.

    hpcinit.after then excludes the node at the next restart. Raise OSError if the record cannot be written.

    folder: the run folder.
    """
    path = folder / run_folder.UNUSABLE / f"{attempt(env)}.{node}"
    safe_files.make_folders(path.parent)
    safe_files.write_atomically(path, "")


def read(path: Path) -> list[Restart]:
    """Return the restarts of the run in `path`, oldest first. Unreadable lines are skipped."""
    return list(run_folder.read_lines(Restart, f"{path}/{run_folder.RESTARTS}"))


def append(path: Path, restart: Restart) -> None:
    """Add the restart to the record of the run in `path`. If that fails, raise OSError; the record stays unchanged."""
    file = path / run_folder.RESTARTS
    before = safe_files.read_text(file) if file.exists() else ""
    safe_files.write_atomically(file, f"{before}{json.dumps(asdict(restart))}\n")
