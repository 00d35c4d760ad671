"""Checksums of files: they show a file that is damaged at its full size, and a file of another save.

CRC32 of each SEGMENT, and the CRC32 of those numbers: segments of one file are read by several threads at a time.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SEGMENT = 64 << 20
BUFFER = 4 << 20
THREADS = 8  # at most


def checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return relative path -> checksum. Raise OSError."""
    segments = {name: range(0, (folder / name).stat().st_size, SEGMENT) for name in names}
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        started = {name: [pool.submit(_crc32, folder / name, at) for at in found] for name, found in segments.items()}
        return {
            name: zlib.crc32(b"".join(part.result().to_bytes(4, "big") for part in parts))
            for name, parts in started.items()
        }


def _crc32(path: Path, begin: int) -> int:
    """Return the CRC32 of one segment of the file."""
    found, left, buffer = 0, SEGMENT, memoryview(bytearray(BUFFER))
    with path.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while left and (number := stream.readinto(buffer[: min(left, BUFFER)])):
            found, left = zlib.crc32(buffer[:number], found), left - number
    return found
