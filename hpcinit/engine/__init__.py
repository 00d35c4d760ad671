"""An engine starts jobs: either Slurm, or this machine without Slurm. `interface.py` describes what an engine does."""

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
    """Return the engine that started the job of this process.

    It is Slurm unless `env` contains the variable that the local engine sets.
    """
    return LOCAL if run_folder.ENV_ENGINE in env else SLURM


def from_record(submission: Mapping[str, Any]) -> Engine:
    """Return the engine that is named in a submission.json. Raise RequestError if there is no such engine."""
    try:
        return ENGINES[submission["engine"]]
    except (KeyError, TypeError):
        raise RequestError(
            f"{run_folder.SUBMISSION} has the engine {submission.get('engine')!r}, expected one of: "
            f"{', '.join(ENGINES)}; was it edited?"
        ) from None
