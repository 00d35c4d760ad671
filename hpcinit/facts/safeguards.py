"""Variables that protect a run: where a hang leaves its traces, and caches that no other job shares.

They are set only where the user has not, before torch is imported, and each is named in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path


def safeguards(env: Mapping[str, str], scratch: Path | None, dumps: Path | None) -> dict[str, str]:
    """The variables to add to `env`, and nothing that it has already (under any of its names)."""
    raise NotImplementedError


def apply(environ: MutableMapping[str, str], folder: Path | None, job: str) -> tuple[str, ...]:
    """Add the safeguards to `environ` and return their names; () where another call of this job did it before.

    folder: the run folder, None without a submission. job: World.job.
    """
    raise NotImplementedError


def describe(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The one line for the log, '' if nothing was set. Only what was set is shown, never what was given."""
    raise NotImplementedError
