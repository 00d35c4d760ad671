"""Compare what --json prints with docs/reference/json.md. The page's tables are the schema."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/reference/json.md"
VERSION = 1
TYPES: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "list": lambda value: isinstance(value, list),
    "empty": lambda value: value == {},
    "any": lambda value: True,
    "null": lambda value: value is None,
}


@functools.cache
def schema() -> dict[str, dict[str, str]]:
    """Return the type of each field of each document: {'logs': {'rank': 'integer or null', ...}, ...}."""
    found = {}
    for section in re.split(r"^##+ ", PAGE.read_text(), flags=re.M)[1:]:
        title = re.match(r"`([^`]+)`\n", section)
        assert title, section.partition("\n")[0]
        found[title[1]] = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| .+ \|$", section, re.M))
    return found


def parse(out: str, *names: str) -> list[dict[str, Any]]:
    """Return the objects of the output of --json. Each must be one of the documents `names`, as the page has it."""
    found = [json.loads(line, parse_constant=_refuse) for line in out.splitlines()]
    for each in found:
        assert each["version"] == VERSION and each["document"] in names, (each["version"], each["document"])
        _check({key: each[key] for key in each if key not in ("document", "version")}, each["document"])
    return found


def _refuse(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def _check(value: Mapping[str, Any], name: str) -> None:
    fields = schema()[name]
    assert value.keys() == fields.keys(), f"{name}: only one of page and output has {value.keys() ^ fields.keys()}"
    for key, item in value.items():
        assert any(_fits(item, one) for one in fields[key].split(" or ")), f"{name}.{key}: {item!r} is no {fields[key]}"


def _fits(value: object, kind: str) -> bool:
    if kind.startswith("list of "):
        return isinstance(value, list) and all(_fits(item, kind.removeprefix("list of ")) for item in value)
    if link := re.fullmatch(r"\[(\w+)\]\(#\1\)", kind):
        if isinstance(value, dict) and value:
            _check(value, link[1])
            return True
        return False
    return TYPES[kind](value)
