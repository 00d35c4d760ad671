"""Plain files in the run folder that the batch script reads: a line `KEY VALUE` for each fact.

bash has no parser for JSON. Its reader is hpcinit_fact() in submit/lib/facts.sh.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcinit.base import safe_files


def text(facts: Mapping[str, object]) -> str:
    """Return the facts as such a file contains them. Raise ValueError for a key or a value that is not on one line."""
    for key, value in facts.items():
        if not key.isidentifier() or not f"{value}".isprintable():
            raise ValueError(f"{key!r} is {value!r}, expected a name and printable text: each has a line")
    return "".join(f"{key} {value}\n" for key, value in facts.items())


def write(path: Path, facts: Mapping[str, object]) -> None:
    """Replace the file atomically. Raise OSError; raise ValueError as text() does."""
    safe_files.write_atomically(path, text(facts))


def read(path: Path) -> dict[str, str]:
    """Return the facts in the file, the last one of each key. Raise OSError."""
    lines = safe_files.read_text(path).splitlines()
    return {key: value for key, _, value in (line.partition(" ") for line in lines) if key}
