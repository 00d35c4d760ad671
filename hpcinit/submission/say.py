"""Lines that must not be lost: a job's id."""

from __future__ import annotations

import os
import sys


def say(*lines: str) -> None:
    """Print on stdout; where that cannot take them (closed, a full disk, a pipe that nobody reads), on stderr.

    What is printed after that goes to stderr too.
    """
    if sys.stdout is not None:  # `>&-`
        try:
            print(*lines, sep="\n", flush=True)
            return
        except OSError:  # what is still in the buffer must fail nobody at the end
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
    sys.stdout = sys.stderr
    print(*lines, sep="\n", flush=True)
