"""The log of a rank whose stdout is a file of ours: a full disk costs lines of it, and not the rank.

Under launch=srun a rank prints into a pipe, and Slurm writes the log. With launch=fork, torchrun and cluster=local the
file is the rank's stdout, and without this print() would raise OSError in the user's program.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hpcinit.base import background_writer
from hpcinit.base.console import say


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes] | None]:
    """Yield the log, to append to; or None where its disk does not take it, with a warning in the log of this process.
    Raise OSError for a wrong path."""
    log = None
    try:
        log = path.open("ab", buffering=0)  # the umask is the user's
    except OSError as error:
        if error.errno not in background_writer.DISK:
            raise
        say(f"warning: {path} cannot be opened: {error.strerror}; what this rank prints goes to the log of the job")
    try:
        yield log
    finally:
        if log is not None:
            log.close()


class _Log(io.FileIO):
    """Drops what the disk does not take, and reports it in the next line that it takes."""

    _lost, _why = 0, ""

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            if self._lost:
                line = f"\nhpcinit: warning: {self._lost} bytes of this log are lost: {self._why}\n".encode()
                if super().write(line) == len(line):
                    self._lost = 0
            written = super().write(data)
        except OSError as error:
            written, self._why = 0, str(error)
        self._lost += size - (written or 0)
        return size


def protect() -> None:
    """From now on print() in this process raises no OSError where stdout and stderr are regular files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # none, closed, or no file below it
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode) or not isinstance(stream, io.TextIOWrapper):
                continue
            stream.flush()
            log = _Log(stream.fileno(), "wb", closefd=False)
            protected = io.TextIOWrapper(
                log if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(log),  # a raw one: python -u
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, protected)
            setattr(sys, f"__{name}__", protected)
