"""Ranges of numbers, an error in one line, and paths as users write them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

LONGEST = 240  # characters of an error in a headline


def ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 3, 8} is '0-3,8'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def brief(error: str) -> str:
    """One line of an error, without our own module's name before it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    # A SyntaxError begins with the place: File "train.py", line 1
    line = lines[-1] if lines[0].startswith('File "') else lines[0]
    line = line.removeprefix("hpcinit.base.errors.")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


# Paths as users write them.


def expanded(place: str) -> Path:
    """`place` with ~ or ~name in front of it as the home folder; as it is written where there is no such user.

    Not Path.expanduser(), which raises RuntimeError for an unknown user and ValueError for a NUL.
    """
    try:
        return Path(os.path.expanduser(place))  # noqa: PTH111 - see above
    except ValueError:
        return Path(place)


def home() -> Path:
    """Return the user's home folder, or /dev/null where there is none: no HOME, and no entry in /etc/passwd.

    Below /dev/null nothing is found, and writing fails with an OSError that names it.
    """
    path = expanded("~")
    return path if path.is_absolute() else Path(os.devnull)


def unknown_user(place: str) -> str:
    """'name' of a ~name/... that is nobody's home, or ''."""
    first = place.partition("/")[0]
    return first[1:] if len(first) > 1 and first.startswith("~") and str(expanded(first)).startswith("~") else ""
