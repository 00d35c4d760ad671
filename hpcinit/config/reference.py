"""Every key with its default and what it means, for `hpcinit submit --help`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from hpcinit.config.schema import Config

WIDTH = 34  # of 'key=default'; what is longer has its explanation on the next line
MUST = "???"  # omegaconf.MISSING
LAST = ("cluster",)  # what a site's file says once for all


def text() -> str:
    """'nodes=1                            number of nodes', a line for each key; those without a table first."""
    groups = sorted((item for item in fields(Config) if table(item)), key=lambda item: item.name in LAST)
    parts = ["\n".join(_lines("", Config))]
    parts += ["\n".join(_lines(f"{item.name}.", table(item))) for item in groups]
    return "\n\n".join(parts)


def _lines(prefix: str, group: Any) -> Iterator[str]:
    for item in fields(group):
        if not table(item):
            word = f"{prefix}{item.name}={shown(item)}"
            gap = " " * (WIDTH - len(word)) if len(word) < WIDTH else "\n" + " " * (WIDTH + 2)
            yield f"  {word}{gap}{item.metadata['help']}"
        elif prefix:
            yield from _lines(f"{prefix}{item.name}.", table(item))


def table(item: Field[Any]) -> Any:
    """The dataclass of a table of keys, None of a key."""
    return item.default_factory if is_dataclass(item.default_factory) else None


def shown(item: Field[Any]) -> str:
    """As in YAML. Nothing where a file has to say it."""
    value = item.default if item.default_factory is MISSING else item.default_factory()
    if value == MUST:
        return ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return f"{value:g}" if isinstance(value, float) else "''" if value == "" else str(value)
