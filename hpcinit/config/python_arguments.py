"""Checks the arguments of the Python API and turns them into overrides, without Hydra, whose import is slow."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from reprlib import Repr

from hpcinit.base.errors import RequestError

_PLAIN = re.compile(r"[A-Za-z_/][\w./+:-]*")  # Hydra reads such a value as text, without quotes
_OTHER_TYPES = {"true", "false", "null", "nan", "inf"}
_EXAMPLE = "program=['train.py', '--lr', '1e-3']"
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60  # characters


def check(overrides: Sequence[object], program: object, keys: Mapping[str, object]) -> None:
    """Raise RequestError if arguments of `api.submit` have the wrong type. The message lists all of them."""
    problems = [
        *(
            f"argument {at} is {_shown(word)}, expected an override as text: 'nodes=8', or the keyword nodes=8"
            for at, word in enumerate(overrides, 1)
            if not isinstance(word, str)
        ),
        *_wrong_program(program),
        *(problem for key, value in keys.items() for problem in _wrong_values(key, value)),
    ]
    if problems:
        raise RequestError("\n".join(problems))


def check_timeout(timeout_s: object) -> None:
    """Raise RequestError if `timeout_s` is neither None nor a number of seconds."""
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool) and not math.isnan(timeout_s)
    if timeout_s is not None and not is_number:
        raise RequestError(f"timeout_s is {_shown(timeout_s)}, expected a number of seconds or None: timeout_s=60")


def check_rank(rank: object) -> None:
    """Raise RequestError if `rank` is not a whole number."""
    if not isinstance(rank, Integral) or isinstance(rank, bool):
        raise RequestError(f"rank is {_shown(rank)}, expected a whole number: rank=0")


def override_value(value: object) -> str:
    """Return `value` in Hydra's override syntax."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # null, true
    if isinstance(value, Real):  # numpy's too
        return repr(int(value) if isinstance(value, Integral) else float(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {override_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(override_value, value))}]"
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _OTHER_TYPES:
        return text
    # In quotes, a backslash counts only before a quote: https://hydra.cc/docs/advanced/override_grammar/basic/
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + (found[2] and r"\'"), text)
    return f"'{quoted}'"


def _wrong_program(program: object) -> Iterator[str]:
    if program is None:
        return
    if isinstance(program, str | bytes | bytearray) or not isinstance(program, Sequence):
        yield f"program is {_shown(program)}, expected a list: {_EXAMPLE}"
        return
    for at, word in enumerate(program):
        if not isinstance(word, str | os.PathLike):
            yield f"program[{at}] is {_shown(word)}, expected text: {_EXAMPLE}"


def _wrong_values(name: str, value: object) -> Iterator[str]:
    """Yield a problem for each part of `value` that a config cannot contain."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _wrong_values(f"{name}.{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        for at, item in enumerate(value):
            yield from _wrong_values(f"{name}[{at}]", item)
    elif not (value is None or isinstance(value, bool | Real | str | os.PathLike)):
        expected = "expected None, a bool, a number, text, a path, a list or a dict"
        yield f"{name} is {_shown(value)}, {expected}: convert it first, for example with str(), float() or list()"


def _shown(value: object) -> str:
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{name}, a function of this process, which the ranks cannot call (put it in a script)"
    return f"{_SHORT.repr(value)} ({type(value).__name__})"
