"""Formats and parses ranges of numbers, shortens errors for messages, and expands paths as users write them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

LONGEST = 240  # characters of an error in a headline
MOST_RANKS = 1 << 20  # a larger number in another program's file can't be a rank or a number of ranks


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: '0-3,8' for {0, 1, 2, 3, 8}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def numbers(text: str) -> set[int]:
    """Return the numbers in a list of ranges: {0, 1, 2, 3, 8} for '0-3,8'. Raise ValueError for any other text."""
    found: set[int] = set()
    for word in filter(None, text.strip().split(",")):
        first, _, last = word.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in '1 node' or '2 nodes'."""
    return f"{number} {noun}{'s' * (number != 1)}"


def rank_names(ranks: Collection[int]) -> str:
    """Return the ranks for a message, as in 'rank 3' or 'ranks 4-6,9'."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def brief(error: str) -> str:
    """Return an error shortened to one line, without the name of hpcinit's module at its start."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    # A SyntaxError starts with the location: File "train.py", line 1
    line = lines[-1] if lines[0].startswith('File "') else lines[0]
    line = line.removeprefix("hpcinit.base.errors.")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


def expanded(place: str) -> Path:
    """Return the path `place` with a leading ~ or ~name expanded. If there is no such user, return it unchanged.

    Path.expanduser() would raise RuntimeError for an unknown user, and ValueError for a NUL character.
    """
    try:
        return Path(os.path.expanduser(place))  # noqa: PTH111 - see above
    except ValueError:
        return Path(place)


def home() -> Path:
    """Return the user's home folder, or /dev/null if neither HOME nor /etc/passwd names one.

    Nothing can exist below /dev/null, and writing there fails with an OSError that contains the path.
    """
    path = expanded("~")
    return path if path.is_absolute() else Path(os.devnull)


def unknown_user(place: str) -> str:
    """Return NAME if the path starts with ~NAME and there is no such user, otherwise ''."""
    first = place.partition("/")[0]
    return first[1:] if len(first) > 1 and first.startswith("~") and str(expanded(first)).startswith("~") else ""
