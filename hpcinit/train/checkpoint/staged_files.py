"""Keeps the files of a checkpoint in memory until the rank's writer process has written them to the disk.

Each file is a memfd. The rank passes its descriptor to the writer. /dev/shm is not used, because it may be small in a
container, and SIGBUS kills a process that writes more than fits.
"""

from __future__ import annotations

import io
import mmap
import os
from typing import Any

from hpcinit.base import free_memory

GROWTH = 64 << 20  # maximum number of bytes to allocate in advance
MOST = 0.9  # the ranks of a node may together take this share of the free memory


class StagedFile(io.RawIOBase):
    """A file in memory. The next save reuses its memory, because the first use of a memory page is slow.

    write() never raises, because an error in it could make torch's C++ writer end the process.

    ranks_here: how many ranks on this node allocate memory at the same time.
    size: how many bytes were passed to write().
    problem: why the file is incomplete, or ''.
    """

    def __init__(self, ranks_here: int) -> None:
        self.descriptor = os.memfd_create("hpcinit-checkpoint")
        self.size, self.problem = 0, ""
        self._ranks_here = ranks_here
        self._pages: mmap.mmap | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, content: Any) -> int:
        """Append the content. If it does not fit into the memory, set `problem`."""
        view = memoryview(content).cast("B")
        begin, self.size = self.size, self.size + len(view)
        if not self.problem and self._grow_to(self.size) and self._pages is not None:
            self._pages[begin : self.size] = view
        return len(view)

    def close(self) -> None:
        """Do nothing. torch calls this after it has written the file, but the content is still needed."""

    def free(self) -> None:
        """Return the file's memory to the system."""
        if self._pages is not None:
            self._pages.close()
        os.close(self.descriptor)

    def _grow_to(self, size: int) -> bool:
        before = 0 if self._pages is None else len(self._pages)
        if size <= before:
            return True
        wanted = size + min(GROWTH, size >> 2)
        free = free_memory.free_bytes()
        if (wanted - before) * self._ranks_here > MOST * free:
            self.problem = f"a copy of more than {size / 1e9:.1f} GB per rank does not fit into the node's memory"
            self.problem += f" ({free / 1e9:.1f} GB are free)"
            return False
        try:
            os.posix_fallocate(self.descriptor, 0, wanted)  # now, because a failure to allocate later is a SIGBUS
            if self._pages is None:
                self._pages = mmap.mmap(self.descriptor, wanted)
            else:
                self._pages.resize(wanted)  # not a new mmap, whose pages would have to be mapped in the next save
        except (OSError, ValueError) as error:
            self.problem = f"its copy in memory cannot be allocated: {error}"
            return False
        return True


class StagedFiles:
    """The files of one save in memory, by their names in the checkpoint."""

    def __init__(self, ranks_here: int) -> None:
        self._ranks_here = ranks_here
        self._known: dict[str, StagedFile] = {}

    def problem(self) -> str:
        """Return why a file is incomplete, or '' if all files are complete."""
        return next((file.problem for file in self._known.values() if file.problem), "")

    def open(self, name: str) -> StagedFile:
        """Return an empty file with this name. If the file exists, empty it.

        Raise OSError if this process has too many open files.
        """
        if name not in self._known:
            self._known[name] = StagedFile(self._ranks_here)
        self._known[name].size = 0
        return self._known[name]

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file. Raise OSError if this process has too many open files."""
        self.open(name).write(content)

    def __getitem__(self, name: str) -> StagedFile:
        return self._known[name]

    def free(self) -> None:
        """Return the memory of all files to the system."""
        for file in self._known.values():
            file.free()
        self._known.clear()
