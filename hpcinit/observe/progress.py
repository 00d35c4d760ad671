"""What the training itself says of how far it is: progress.json, written by `run.progress()`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcinit.facts import runfolder


def read(path: Path) -> dict[str, Any]:
    """{step, total, values: {name: number}, time}, or {} before the first."""
    try:
        document: dict[str, Any] = json.loads((path / runfolder.PROGRESS).read_text())
    except (OSError, ValueError):
        return {}
    return document


def line(path: Path) -> str:
    """'step 20/60  loss 2.31', or ''."""
    document = read(path)
    if not document:
        return ""
    values = "".join(f"  {name} {value:.4g}" for name, value in document["values"].items())
    return f"step {document['step']}/{document['total']}{values}"
