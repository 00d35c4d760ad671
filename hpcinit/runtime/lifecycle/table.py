"""What the ranks of a node share while they train: a slot of bytes for each, in a file on the node's own disk."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


class Table:
    """Written with pwrite(2) and not through a mapping: where the disk is full, or another process cuts the file short,
    a write to a mapping ends the process with SIGBUS. A write costs about a microsecond."""

    def __init__(self, path: Path, size: int, at: int, slot: bytes) -> None:
        """Open the file of `size` bytes, or make it, and write this rank's first `slot` at the offset `at`. Raise
        OSError where that fails; afterwards the bytes of this slot are allocated, and writing them needs no room."""
        self._size = size
        # A file object closes itself.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        self._fd = self._file.fileno()
        if os.pwrite(self._fd, slot, at) < len(slot):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def write(self, at: int, data: bytes) -> None:
        """Never raises: a heartbeat that is lost is no reason to end a step."""
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, data, at)

    def read(self) -> bytes:
        """All slots; zeros where no rank has written. Raises OSError."""
        return os.pread(self._fd, self._size, 0).ljust(self._size, b"\0")
