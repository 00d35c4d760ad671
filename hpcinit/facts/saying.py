"""What a process of a job says on stderr: whole lines, though others write to the same log."""

from __future__ import annotations

import contextlib
import sys

from hpcinit.facts.terminal import plain


def say(text: str) -> None:
    """'hpcinit: text' and its end of line in one write(2).

    print() writes text and end of line apart, with and without python -u, and another process's line came between the
    two. Raises nothing: a full disk below the log is no reason to end a rank.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: the program has closed it
        if sys.stderr is not None:
            sys.stderr.write(f"hpcinit: {plain(text)}\n")
            sys.stderr.flush()
