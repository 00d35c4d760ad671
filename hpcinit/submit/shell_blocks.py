"""Inserts the bash files in lib/ into the batch script, as blocks of lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hpcinit.base.quoting import shell

LIB = Path(__file__).parent / "lib"
# hpcinit_nodes='' # that the ranks need
VARIABLE = re.compile(r"(?P<head>(?:export )?(?P<name>\w+)=)''(?:\s+(?P<comment>#.*))?")


def block(name: str, values: Mapping[str, str | int] | None = None) -> list[str]:
    """Return the lines of the bash file lib/NAME.sh, with its variables set to `values`.

    The file declares its variables directly below its first comment, by setting each to ''. Each value is quoted,
    unless its type is quoting.Raw. Raise ValueError unless `values` contains exactly the declared variables.
    """
    left = dict(values or {})
    first, *lines = _text(name).splitlines()
    if not first.startswith("# shellcheck shell=bash"):
        raise ValueError(f"lib/{name}.sh starts with {first!r}, expected: # shellcheck shell=bash")
    end = next((at for at, line in enumerate(lines) if not line.startswith("#") and "=''" not in line), len(lines))
    for at, line in enumerate(lines[:end]):
        if found := VARIABLE.fullmatch(line):
            if found["name"] not in left:
                raise ValueError(f"lib/{name}.sh needs a value for {found['name']}")
            comment = f" {found['comment']}" if found["comment"] else ""
            lines[at] = f"{found['head']}{_quoted(left.pop(found['name']))}{comment}"
    if left:
        raise ValueError(f"lib/{name}.sh has no variable {', '.join(left)}")
    return [line for line in lines if not line.lstrip().startswith("# shellcheck ")]


@cache
def _text(name: str) -> str:
    return (LIB / f"{name}.sh").read_text()


def _quoted(value: str | int) -> str:
    return shell(value) if isinstance(value, str) else str(value)
