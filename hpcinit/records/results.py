"""The result of a run: result.json, such as `{"value": 0.25}`, `{"value": [0.25, 3]}` or any other JSON value.

A hyperparameter search needs one or more numbers. A training run never fails because of its result: if the value cannot
be written as JSON, hpcinit prints a warning.
"""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from hpcinit.base import background_writer, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import RequestError
from hpcinit.records import run_folder

Value = float | tuple[float, ...]


def reported(value: object) -> Any:
    """Convert `value` to a JSON value.

    Numbers become floats, and a tensor or array with one element becomes that element.

    Raise RequestError if JSON cannot contain the value.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): reported(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [reported(item) for item in value]
    if getattr(value, "shape", None) is not None and math.prod(value.shape) == 1:  # type: ignore[attr-defined]
        return reported(value.item())  # type: ignore[attr-defined]
    advice = "; for a tensor use tensor.tolist()" if hasattr(value, "tolist") else ""
    raise RequestError(
        f"the result is {str(value)[:80]!r} ({type(value).__name__}), expected numbers, text, None, or lists and dicts "
        f"of them{advice}"
    )


def numbers(value: object) -> Value:
    """Return a result as a float or a list of floats, for the search of a sweep.

    Raise RequestError if the result isn't a number or a list of numbers.
    """
    if _is_number(value):
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, list) and value and all(map(_is_number, value)):
        return tuple(float(item) for item in value)
    kind = type(value).__name__
    raise RequestError(f"the result is {str(value)[:80]!r} ({kind}), expected a number or a list of numbers")


_unwritten: dict[Path, str] = {}  # the text of each result.json that is not written yet


def write(folder: Path, value: Any) -> None:
    """Write the result to result.json atomically. Raise OSError if that is not possible."""
    safe_files.write_atomically(folder / run_folder.RESULT, json.dumps({"value": value}) + "\n")


def write_or_print(folder: Path, value: Any) -> None:
    """Write the result. If that fails, retry until the process ends, and then print the result.

    Never raise OSError, because an error would fail a training run that has finished and saved.
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
    background_writer.flush()
    for path, text in _unwritten.items():
        say(f"error: cannot write {path}. Free disk space, and write this result into the file: {text}")


def read(folder: Path) -> Any:
    """Return the result of a run, or None if the run wrote none. Raise RequestError if the file contains no result."""
    file = folder / run_folder.RESULT
    try:
        return safe_files.read_json(file)["value"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f'{file} cannot be used: {error!r}; expected content such as {{"value": 0.25}}') from None


def read_numbers(folder: Path) -> Value | None:
    """Return the result of a run as floats, or None if the run wrote none.

    Raise RequestError if the result is not a number or a list of numbers, or contains NaN.
    """
    file = folder / run_folder.RESULT
    value = read(folder)
    if value is None and not file.exists():
        return None
    try:
        found = numbers(value)
    except RequestError as error:
        raise RequestError(f'{file} cannot be used: {error}; expected content such as {{"value": 0.25}}') from None
    if any(math.isnan(item) for item in (found if isinstance(found, tuple) else (found,))):
        raise RequestError(f"{file} contains {value}, expected a number. Did the training diverge?")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
