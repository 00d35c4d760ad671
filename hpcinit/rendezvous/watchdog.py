"""A deadline that works even if a call into torch never returns."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from hpcinit.base.console import say

# torch's own timeout is not sufficient: a client whose port belonged to a silent server still waited after
# 200 s with a timeout of 5 s (torch 2.13).


class Watchdog:
    """Terminates the process if the block takes longer than `seconds`: message, all stacks, exit status 1.

    about: returns the message; it must not block for long.
    """

    def __init__(self, seconds: float, about: Callable[[], str]) -> None:
        self._about = about
        self._timer = threading.Timer(seconds, self._bark)
        self._timer.daemon = True

    def __enter__(self) -> Watchdog:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _bark(self) -> None:
        try:
            reason = self._about()
        except Exception as error:
            reason = f"the start-up timed out, and its state cannot be read: {error!r}"
        end_hard(reason, stacks=True)


def end_hard(reason: str, stacks: bool = False) -> None:
    """Print the reason and exit immediately: no exit handler may hang on a group whose peers are dead.

    Nothing may prevent the exit: the program may have replaced or closed its streams.
    """
    try:
        with contextlib.suppress(Exception):
            say(f"error: {reason}")
        if stacks:
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback(file=2, all_threads=True)  # 2: the original stderr of the process
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    finally:
        os._exit(1)
