"""The result of a run, one number or several: result.json, `{"value": 0.25}` or `{"value": [0.25, 3]}`."""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Sequence
from numbers import Real
from pathlib import Path

from hpcinit.base import background_writer, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import RequestError
from hpcinit.records import run_folder

Value = float | tuple[float, ...]


def checked_value(value: object) -> Value:
    """Return `value` as floats. Raise RequestError if it is neither a number nor a sequence of numbers."""
    if _is_number(value):
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(map(_is_number, value)):
        return tuple(float(item) for item in value)
    kind = type(value).__name__
    advice = "; for a tensor use tensor.item()" if hasattr(value, "item") else ""
    raise RequestError(
        f"the result is {str(value)[:80]!r} ({kind}), expected a number or a sequence of numbers{advice}"
    )


_unwritten: dict[Path, str] = {}  # the text of each result.json that is not written yet


def write(folder: Path, value: Value) -> None:
    """Write the result atomically. Raise OSError."""
    safe_files.write_atomically(folder / run_folder.RESULT, json.dumps({"value": value}) + "\n")


def write_or_print(folder: Path, value: Value) -> None:
    """Write the result; if that fails, retry until the process ends, then print it. Never raise OSError.

    An error here would fail a training run that has finished and saved, and would end the other ranks.
    """
    path, text = folder / run_folder.RESULT, json.dumps({"value": value})
    if not _unwritten:
        atexit.unregister(_print)
        atexit.register(_print)
    _unwritten[path] = text

    def write_result() -> None:
        safe_files.write_atomically(path, text + "\n")
        if _unwritten.get(path) == text:
            del _unwritten[path]

    background_writer.later(run_folder.RESULT, write_result)
    background_writer.flush()


def _print() -> None:
    """Print the results that could not be written, at the end of the process."""
    background_writer.flush()
    for path, text in _unwritten.items():
        say(f"error: {path} could not be written; free disk space and write this result to it: {text}")


def read(folder: Path) -> Value | None:
    """Return the result; None if the run wrote none. Raise RequestError if the file is not a result or contains NaN."""
    file = folder / run_folder.RESULT
    try:
        document = json.loads(file.read_text())
        value = checked_value(document["value"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RequestError) as error:
        raise RequestError(f'{file} cannot be used: {error!r}; expected {{"value": 0.25}} in it') from None
    if any(math.isnan(item) for item in (value if isinstance(value, tuple) else (value,))):
        raise RequestError(f"{file} contains {document['value']}, expected a number: did training diverge?")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
