"""A line on stderr, in a terminal, while a command works for more than a second and has said nothing yet."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from hpcinit.facts import telling

FIRST_S, AGAIN_S = 1.0, 0.5


@contextmanager
def shown(name: str) -> Iterator[None]:
    """'hpcinit status: waiting for squeue (3 s)', updated in place; gone before anything else is printed.

    For a stderr that is a terminal; nothing where it cannot go back in a line (TERM=dumb), and nothing with -q.
    """
    if os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    line, out, err = _Line(name, sys.stderr), sys.stdout, sys.stderr
    its_out, its_err = None if out is None else _Door(out, line), _Door(err, line)
    sys.stdout, sys.stderr = its_out, its_err
    threading.Thread(target=line.run, daemon=True).start()
    try:
        yield
    finally:
        line.end()
        if sys.stdout in (its_out, its_err):  # the latter where stdout could take no more: submission/say.py
            sys.stdout = out if sys.stdout is its_out else err
        if sys.stderr is its_err:
            sys.stderr = err


class _Line:
    def __init__(self, name: str, terminal: TextIO) -> None:
        self._name, self._terminal = name, terminal
        self._over, self._lock, self._there = threading.Event(), threading.Lock(), False
        self._began, self._thread = time.monotonic(), threading.get_native_id()

    def run(self) -> None:
        pause = FIRST_S
        while not self._over.wait(pause):
            pause = AGAIN_S
            with self._lock:
                if self._over.is_set() or telling.quiet():
                    continue
                child = _child(self._thread)
                about = f": waiting for {child}" if child else ""
                text = f"hpcinit {self._name}{about} ({time.monotonic() - self._began:.0f} s)"
                self._write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
                self._there = True

    def end(self) -> None:
        """The line is gone, and stays away."""
        if self._over.is_set():
            return
        with self._lock:
            self._over.set()
            if self._there:
                self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal that was closed meanwhile
            self._terminal.write(text)
            self._terminal.flush()


class _Door:
    """A stream through which the first word ends the line."""

    def __init__(self, stream: TextIO, line: _Line) -> None:
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        self._line.end()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _child(thread: int) -> str:
    """The program that this process has started last and that still runs, as Linux knows it; else ''."""
    try:
        children = Path(f"/proc/self/task/{thread}/children").read_text().split()
        return Path(f"/proc/{children[-1]}/comm").read_text().strip() if children else ""
    except OSError:
        return ""
