"""Engines: Slurm, and this machine without Slurm. `interface.py` lists what an engine must be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcinit.base.errors import RequestError
from hpcinit.engine.interface import Engine
from hpcinit.engine.local_engine import LOCAL
from hpcinit.engine.slurm_engine import SLURM
from hpcinit.records import run_folder

__all__ = ["ENGINES", "LOCAL", "SLURM", "Engine", "from_environment", "from_record"]
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (SLURM, LOCAL)}  # by the value of cluster.engine


def from_environment(env: Mapping[str, str]) -> Engine:
    """Return the engine of the job that this process belongs to.

    It is Slurm unless the environment has the variable of the local engine.
    """
    return LOCAL if run_folder.ENV_ENGINE in env else SLURM


def from_record(submission: Mapping[str, Any]) -> Engine:
    """Return the engine that a submission.json names. Raise RequestError if there is no such engine."""
    try:
        return ENGINES[submission["engine"]]
    except (KeyError, TypeError):
        raise RequestError(
            f"{run_folder.SUBMISSION} has the engine {submission.get('engine')!r}, expected one of: "
            f"{', '.join(ENGINES)}; was it edited?"
        ) from None
