"""Sets the environment variables with which wandb or mlflow continues the same tracker run in each attempt.

hpcinit imports no tracker. The reasons are in decision 0251.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.records import run_folder
from hpcinit.records.spec import MLFLOW, WANDB, Spec


def variables(spec: Spec, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to rank 0's environment, so that all attempts are recorded in one tracker run.

    If the user has set the tracker's id, return {}.
    """
    if spec.tracker == WANDB and "WANDB_RUN_ID" not in environ:
        # The nonce is the same in all attempts. Each task of a sweep, and a resubmission, has a different nonce.
        own = hashlib.sha256(f"{WANDB} {spec.nonce}".encode()).hexdigest()[:16]
        return {"WANDB_RUN_ID": own, "WANDB_RESUME": environ.get("WANDB_RESUME", "allow")}
    if spec.tracker == MLFLOW and "MLFLOW_RUN_ID" not in environ and (known := reported(folder)):
        return {"MLFLOW_RUN_ID": known}
    return {}


def reported(folder: Path) -> str:
    """Return the id that the program reported with run.tracker_id(), or '' if it reported none.

    folder: the run folder.
    """
    with suppress(OSError):
        text = safe_files.read_text(folder / run_folder.TRACKER).strip()
        return text if text.isprintable() else ""
    return ""
