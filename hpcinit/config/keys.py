"""Looks up what the schema declares about a key (its type, bounds and help), for `--help` and for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from hpcinit.base.errors import RequestError
from hpcinit.config.schema import Config

TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
UNITS = {"_min": " of minutes", "_s": " of seconds", "_h": " of hours", "_gb": " of GB", "_mb": " of MB"}
WIDTH = 34  # column of the explanations in the help; after a longer 'key=default' the explanation is on the next line
MUST = "???"  # omegaconf.MISSING
LAST = ("cluster",)  # shown last, because a site's file sets these keys


@cache
def declared() -> dict[str, Field[Any]]:
    """Return all keys with their fields, as in {'comm.backend': Field}. Tables of keys are omitted."""
    return dict(_declared("", Config))


def _declared(prefix: str, group: Any) -> Iterator[tuple[str, Field[Any]]]:
    for item in fields(group):
        if below := table(item):
            yield from _declared(f"{prefix}{item.name}.", below)
        else:
            yield f"{prefix}{item.name}", item


def table(item: Field[Any]) -> Any:
    """Return the dataclass of a field that is a table of keys, or None if the field is not such a table."""
    return item.default_factory if is_dataclass(item.default_factory) else None


def choices(key: str) -> tuple[str | None, ...]:
    """Return the values that are allowed for `key`, or () if any value is allowed. None in the tuple means null."""
    item = declared().get(key)
    known = tuple(item.metadata["choices"]) if item else ()
    return (*known, None) if known and None not in known and _optional(key) else known


def bounds(about: Mapping[str, Any]) -> str:
    """Return the bounds of a key as text, such as '1 or more', 'more than 0' or '1 to 100'. Return '' if it has none.

    about: the field's metadata.
    """
    if about["above"] is not None:
        return f"more than {about['above']}"
    if about["least"] is None:
        return ""
    return f"{about['least']} or more" if about["most"] is None else f"{about['least']} to {about['most']}"


def options(kind: str) -> dict[str, str]:
    """Return the options of sbatch and srun that config keys set, each with its key.

    kind: 'sbatch' for options that get the key's value, 'owns' for options that hpcinit computes from it.
    """
    return {option: key for key, item in declared().items() for option in item.metadata[kind].split()}


def value(config: Config, key: str) -> Any:
    """Return the value of `key` in `config`."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def kind(key: str) -> Any:
    """Return the type of `key` (str for 'cluster.env.A'), or None if the schema has no such key."""
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
    """Return whether `key` is a table in which users choose the names, such as cluster.env."""
    return get_origin(_plain(kind(key))) is dict


def is_container(key: str) -> bool:
    """Return whether the value of `key` is a table or a list."""
    plain = _plain(kind(key))
    return is_dataclass(plain) or get_origin(plain) in (dict, list)


def beside(key: str) -> list[str]:
    """Return the keys in the same table as `key`.

    Return [] if users choose the names in that table, or if there is no such table.
    """
    parent = key.rpartition(".")[0]
    found = _plain(kind(parent)) if parent else Config
    return sorted(field.name for field in fields(found)) if is_dataclass(found) else []


def expected(key: str) -> str:
    """Return a description of the values that `key` accepts, for a message. Return '' if the schema has no such key."""
    known = kind(key)
    if known is None:
        return ""
    if found := choices(key):
        return "one of: " + ", ".join(choice or "null" for choice in found)
    plain = _plain(known)
    if get_origin(plain) is list:
        text = f"a list, as in {key}=[a,b]"
    elif get_origin(plain) is dict or is_dataclass(plain):
        text = f"a table; add an entry with +{key}.NAME=VALUE"
    else:
        text = TYPES.get(plain, "a value")
        if plain in (int, float):
            text += next((unit for end, unit in UNITS.items() if key.endswith(end)), "")
    return f"{text}, or null" if plain is not known else text


def guess(name: str, known: Sequence[str]) -> str:
    """Return '; did you mean ...?' with the most similar of the `known` names, or '' if none is similar."""
    close = _close(name, known)
    return f"; did you mean {close!r}?" if close else ""


def nearest(key: str) -> str:
    """Return `key` if it exists, otherwise the most similar key in the same table, or ''."""
    if kind(key) is not None:
        return key
    parent, dot, last = key.rpartition(".")
    close = _close(last, beside(key))
    return f"{parent}{dot}{close}" if close else ""


# The most common settings, in this order, besides the groups cluster and parallel: docs/configuration.md.
FIRST = (
    "nodes", "ranks_per_node", "time_min", "partition", "account", "name", "dry_run", "wait",
    "restart.max_restarts", "secrets",
)  # fmt: skip
ALL = "hpcinit submit --help all lists all keys"


def help_text(every: bool) -> str:
    """Return the text of --help: one line per key, as in 'nodes=1      number of nodes'.

    every: whether to list all keys instead of only those in FIRST.
    """
    if not every:
        known = declared()
        more = f"  ... and {len(known) - len(FIRST)} more: {ALL}"
        return f"{_lines({key: known[key] for key in FIRST})}\n{more}"
    groups = sorted((item for item in fields(Config) if table(item)), key=lambda item: item.name in LAST)
    parts = [_lines({key: item for key, item in declared().items() if "." not in key})]
    parts += [_lines(dict(_declared(f"{item.name}.", table(item)))) for item in groups]
    return "\n\n".join(parts)


def explained(key: str) -> str:
    """Return the help for `key`: its line of --help, the allowed values and its unit.

    For a table, return the lines of its keys.

    Raise RequestError for an unknown key.
    """
    below = {name: item for name, item in declared().items() if name == key or name.startswith(f"{key}.")}
    if not below:
        same = [name for name in declared() if name.endswith(f".{key}")]  # a name without its table
        hint = f"; did you mean {' or '.join(same)}?" if same else guess(key.rpartition(".")[2], beside(key))
        raise RequestError(f"no such key {key!r}{hint or f'; {ALL}'}")
    if key not in below:
        return _lines(below)
    limits = bounds(below[key].metadata)
    return f"{_lines(below)}\n  expected: {expected(key)}{f', {limits}' if limits else ''}"


def _lines(group: Mapping[str, Field[Any]]) -> str:
    lines = []
    for key, item in group.items():
        start = f"{key}={shown(item)}"
        gap = " " * (WIDTH - len(start)) if len(start) < WIDTH else "\n" + " " * (WIDTH + 2)
        lines.append(f"  {start}{gap}{item.metadata['help']}")
    return "\n".join(lines)


def shown(item: Field[Any]) -> str:
    """Return a key's default as YAML, or '' if the key is mandatory."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    if default == MUST:
        return ""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, list):
        return f"[{', '.join(default)}]"
    return f"{default:g}" if isinstance(default, float) else "''" if default == "" else str(default)


def _close(wrong: str, known: Sequence[str]) -> str:
    lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(wrong.lower(), lower, n=1, cutoff=0.65)
    return lower[found[0]] if found else ""


def _plain(hint: Any) -> Any:
    """Return X for Optional[X], and any other type unchanged."""
    if get_origin(hint) is Union:
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


def _optional(key: str) -> bool:
    known = kind(key)
    return _plain(known) is not known


@cache
def _hints(known: type) -> dict[str, Any]:
    return get_type_hints(known)
