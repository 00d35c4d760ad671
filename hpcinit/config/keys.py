"""What the schema says of a key: which type, what stands beside it, what is expected of its value."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from hpcinit.config.checks import CHOICES
from hpcinit.config.schema import Config

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
UNITS = {"_min": " of minutes", "_s": " of seconds", "_h": " of hours", "_gb": " of GB", "_mb": " of MB"}


def kind(key: str) -> Any:
    """The type of `key` ('cluster.env.A': str), or None where the schema has no such key."""
    found: Any = Config
    for part in key.split("."):
        found = _plain(found)
        if is_dataclass(found):
            found = _hints(found).get(part)  # type: ignore[arg-type]
        else:
            found = get_args(found)[1] if get_origin(found) is dict else None
    return found


def is_group(key: str) -> bool:
    return "." not in key and is_dataclass(kind(key))


def is_table(key: str) -> bool:
    """Whether users choose the names below `key` themselves, as in cluster.env."""
    return get_origin(_plain(kind(key))) is dict


def beside(key: str) -> list[str]:
    """The keys that exist where `key` was looked for; none where users choose them or there is no such place."""
    parent = key.rpartition(".")[0]
    found = _plain(kind(parent)) if parent else Config
    return sorted(field.name for field in fields(found)) if is_dataclass(found) else []


def expected(key: str) -> str:
    """What a value of `key` has to be, in words; '' for a key that the schema does not know."""
    known = kind(key)
    if known is None:
        return ""
    if key in CHOICES:
        return "one of: " + ", ".join(choice or "null" for choice in CHOICES[key])
    plain = _plain(known)
    if get_origin(plain) is list:
        words = f"a list, as in {key}=[a,b]"
    elif get_origin(plain) is dict or is_dataclass(plain):
        words = f"a table, one entry is +{key}.NAME=VALUE"
    else:
        words = WORDS.get(plain, "a value")
        if plain in (int, float):
            words += next((unit for end, unit in UNITS.items() if key.endswith(end)), "")
    return f"{words}, or null" if plain is not known else words


def guess(word: str, known: Sequence[str]) -> str:
    """'; did you mean ...?', or '' where nothing is close."""
    close = _close(word, known)
    return f"; did you mean {close!r}?" if close else ""


def nearest(key: str) -> str:
    """`key` itself, or the one at the same place that it is close to; '' for none."""
    if kind(key) is not None:
        return key
    parent, dot, last = key.rpartition(".")
    close = _close(last, beside(key))
    return f"{parent}{dot}{close}" if close else ""


def _close(word: str, known: Sequence[str]) -> str:
    lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.65)
    return lower[found[0]] if found else ""


def _plain(hint: Any) -> Any:
    """X of Optional[X]."""
    if get_origin(hint) is Union:
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


@cache
def _hints(known: type) -> dict[str, Any]:
    return get_type_hints(known)
