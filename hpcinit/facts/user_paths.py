"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


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
