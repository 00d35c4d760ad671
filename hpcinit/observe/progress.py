"""What the training itself says of how far it is: progress.json, written by `run.progress()`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcinit.facts import beats, runfolder


def read(path: Path) -> dict[str, Any]:
    """{step, total, values: {name: number}, time}, or {} before the first, and where it cannot be read."""
    try:
        with open(f"{path}/{runfolder.PROGRESS}", "rb", buffering=0) as file:  # noqa: PTH123 - many runs
            document = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    known = isinstance(document, dict) and {"step", "total", "values"} <= document.keys()
    return document if known else {}


def line(path: Path) -> str:
    """'step 20/60  loss 2.31', or ''."""
    return words(read(path))


def words(document: Mapping[str, Any]) -> str:
    """The same of what read() returns."""
    return "  ".join([f"step {document['step']}/{document['total']}", *values(document)]) if document else ""


def values(document: Mapping[str, Any]) -> list[str]:
    """['loss 2.31', 'lr 0.0003'] of what read() returns."""
    return [
        f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} {value}"
        for name, value in document.get("values", {}).items()
    ]


def age_s(path: Path, now_s: float) -> float | None:
    """Seconds since any rank told a step, by its last attempt's beats, or else since rank 0 told its progress."""
    attempts = [entry for entry in _entries(path / beats.FOLDER) if entry.is_dir()]
    last = max(attempts, key=lambda entry: entry.stat().st_mtime, default=None)
    told = [
        max(0.0, now_s - node.time) + beat.silent_s
        for node in (beats.read(Path(last.path)) if last else [])
        for beat in node.beats
        if beat.silent_s is not None
    ]
    time_s = read(path).get("time")
    if isinstance(time_s, int | float):
        told.append(max(0.0, now_s - time_s))
    return min(told, default=None)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(path))
    except OSError:
        return []
