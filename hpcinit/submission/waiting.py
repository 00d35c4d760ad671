"""One line on stderr for what takes its time: updated in place in a terminal, else a line for each new message."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress

from hpcinit.facts import telling

AGAIN_S = 60.0  # without a terminal the same message is repeated so often


class Waiting:
    """Shows nothing until told to."""

    def __init__(self) -> None:
        self._said, self._at, self._began = "", 0.0, time.monotonic()
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, message: str) -> None:
        """`message`, and for how long this has taken."""
        clock = time.monotonic()
        text = f"hpcinit: {message} ({clock - self._began:.0f} s)"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            _write(f"\r\x1b[K{text[:width]}")
        elif message != self._said or clock - self._at >= AGAIN_S:
            _write(f"{text}\n")
            self._at = clock
        self._said = message

    def end(self) -> None:
        """What is printed next stands on a line of its own."""
        if self._terminal and self._said:
            _write("\n")
        self._said = ""


def _write(text: str) -> None:
    """A terminal that was closed meanwhile must not end a submission whose job exists."""
    if sys.stderr is not None and not telling.quiet():  # `2>&-`
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
