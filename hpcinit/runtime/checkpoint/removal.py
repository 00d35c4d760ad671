"""Removal of folders in the background: no rank waits for it, and a failure is a line on stderr, not an error."""

from __future__ import annotations

import atexit
import secrets
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpcinit.facts.saying import say
from hpcinit.runtime.process_state import state

SUFFIX = ".gone"
AT_EXIT_S = 10.0  # less than the 30 s after which Slurm kills (KillWait); a later save removes what is left


def later(work: Callable[[], None]) -> None:
    """Run `work` in a thread, after all that was given before. Print a line if it raises OSError."""
    if state.removal is None:
        atexit.register(wait, AT_EXIT_S)
    before = state.removal

    def run() -> None:
        if before is not None:
            before.join()
        try:
            work()
        except OSError as error:
            say(f"warning: an old checkpoint could not be removed: {error}")

    state.removal = threading.Thread(target=run, name="hpcinit-removal", daemon=True)
    state.removal.start()


def wait(seconds: float) -> bool:
    """Wait until all removals are done, at most so long; return whether they are."""
    last = state.removal
    if last is None:
        return True
    last.join(seconds)
    return not last.is_alive()


def set_aside(path: Path) -> Path:
    """Rename the folder, so that half of it never has the name of the whole. Return the new name. Raise OSError."""
    aside = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}{SUFFIX}")
    path.rename(aside)
    return aside


def remove(path: Path) -> None:
    """Raise OSError, but not if another process removes it at the same time."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path if path.name.endswith(SUFFIX) else set_aside(path))
