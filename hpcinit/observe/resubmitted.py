"""Records which run replaced another: `hpcinit resubmit` writes the record, and `status` shows the newest run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.records import run_folder


def note(run: Path, again: Path) -> None:
    """Record that the run `again` replaces `run`. If the record can't be written, `status` shows both runs.

    run: the folder of a run or of a sweep's task.
    """
    folder, task = _place(run)
    line = json.dumps({"task": task, "run": os.path.relpath(again, folder)}) + "\n"
    with suppress(OSError):
        safe_files.append(folder / run_folder.RESUBMITTED, line)


def of_sweep(sweep: Path) -> Mapping[str, Path]:
    """Return the newest run of each task that was submitted again, by the task's number.

    sweep: the folder of the sweep.
    """
    return {task: newest(run) for task, run in _noted(sweep).items()}


def newest(run: Path) -> Path:
    """Return the last run that replaced `run`, or `run` itself if none did.

    run: the folder of a run or of a sweep's task.
    """
    seen = set[Path]()
    while run not in seen:
        seen.add(run)
        folder, task = _place(run)
        run = _noted(folder).get(task, run)
    return run


def sweep_of(run: Path) -> Path | None:
    """Return the folder of the sweep to which the task `run` belongs, or None if `run` is not a task."""
    return run.parent if run.name.isdigit() and (run.parent / run_folder.SWEEP).is_file() else None


def _place(run: Path) -> tuple[Path, str]:
    """Return the folder that records which run replaced `run`, and the key in the record.

    A sweep's folder has the records of all its tasks. The key is the task's number, or '' if `run` is not a task.
    """
    return (sweep, run.name) if (sweep := sweep_of(run)) else (run, "")


def _noted(folder: Path) -> dict[str, Path]:
    """Return the runs that replaced others, according to the record in `folder`. The keys are as in _place().

    Runs that no longer exist are skipped.
    """
    found: dict[str, Path] = {}
    with suppress(OSError):
        for line in safe_files.read_text(folder / run_folder.RESUBMITTED).splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line that a full disk cut off
                document = json.loads(line)
                again = Path(os.path.normpath(folder.absolute() / document["run"]))
                if (again / run_folder.SUBMISSION).is_file():
                    found[str(document["task"])] = again
    return found
