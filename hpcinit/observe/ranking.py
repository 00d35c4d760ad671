"""Sort runs by a value: the last metrics of `run.progress()`, `result.json`, the step or the time of submission."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcinit.base.errors import RequestError
from hpcinit.observe import progress, requests
from hpcinit.observe.overview import Run
from hpcinit.records import results

RESULT, STEP, SUBMITTED = "result", "step", "submitted"


def result(path: Path) -> results.Value | None:
    """Return the value of result.json; None if the run wrote none that is usable."""
    try:
        return results.read(path)
    except RequestError:
        return None


def values(path: Path) -> dict[str, Any]:
    """Return the values of a run that it can be sorted by."""
    document = progress.read(path)
    found: dict[str, Any] = {**document.get("values", {})}
    if document:
        found.setdefault(STEP, document["step"])
    if (value := result(path)) is not None:
        found.setdefault(RESULT, value)
    if (submitted := requests.submitted(path)) is not None:
        found.setdefault(SUBMITTED, submitted)
    return found


def sort(runs: Sequence[Run], key: str, reverse: bool) -> list[Run]:
    """Return the runs with the smallest value of `key` first; runs without the value, or with NaN, are the last.

    Raise RequestError if no run has the value.
    """
    known = [(run, values(run.path)) for run in runs]
    if runs and not any(key in found for _, found in known):
        names = ", ".join(dict.fromkeys(name for _, found in known for name in found)) or "none"
        raise RequestError(f"--sort is {key!r}, but no run has this value; values of these runs: {names}")
    ranked = [(_number(found.get(key)), run) for run, found in known]
    usable = sorted(((number, run) for number, run in ranked if number is not None), key=_first, reverse=reverse)
    return [run for _, run in usable] + [run for number, run in ranked if number is None]


def _first(pair: tuple[float, Run]) -> float:
    return pair[0]


def _number(value: object) -> float | None:
    """Return a number that can be compared; for several objectives, the first one."""
    first = value[0] if isinstance(value, tuple | list) and value else value
    return float(first) if isinstance(first, int | float) and not math.isnan(first) else None
