"""Keeps print() from failing if a rank's stdout is a file on a full disk. Lines are lost, but the rank continues.

With launch=srun, a rank prints to a pipe, and Slurm writes the log. With launch=fork, launch=torchrun and
cluster=local, the rank's stdout is the log file itself, so print() would raise OSError when the disk is full.
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
    """Yield the log file, open for appending. If the disk reports an error, print a warning and yield None.

    Raise OSError if the path is wrong.
    """
    log = None
    try:
        log = path.open("ab", buffering=0)  # the user's umask applies
    except OSError as error:
        if error.errno not in background_writer.DISK:
            raise
        say(f"warning: cannot open {path}: {error.strerror}; the output of this rank is in the log of the job instead")
    try:
        yield log
    finally:
        if log is not None:
            log.close()


class _Log(io.FileIO):
    """A log file that drops text while the disk is full. Afterwards, it gets a line that reports how much was lost."""

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
    """Make print() ignore disk errors if stdout and stderr of this process are regular files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # missing, closed, or without a file descriptor
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode) or not isinstance(stream, io.TextIOWrapper):
                continue
            stream.flush()
            log = _Log(stream.fileno(), "wb", closefd=False)
            protected = io.TextIOWrapper(
                log if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(log),  # unbuffered: python -u
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, protected)
            setattr(sys, f"__{name}__", protected)
