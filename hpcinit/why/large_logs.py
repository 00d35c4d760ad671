"""Reads the parts of a large log that can show a failure: the start, the end, and lines after failure messages."""

from __future__ import annotations

import os
import re
from typing import BinaryIO

WHOLE = 4 << 20  # a log of up to this many bytes is read completely
START, END = 256 << 10, 2 << 20  # bytes; the world size is at the start, and messages of Slurm are at the end
WINDOW, BEFORE = 16 << 10, 256  # bytes after and before a message
MOST_WINDOWS = 64  # parts per message: hpcinit reads the first ones, because later errors are usually consequences
CHUNK = 8 << 20
LARGEST = 4 << 30  # bytes of a log that are searched
MESSAGES = (  # of Python, srun, slurmstepd, torchrun, torch's watchdog, NCCL, the driver, DeepSpeed and Lightning
    b"Traceback (most recent call last)",
    b"srun: error",
    b"slurmstepd",
    b"CANCELLED AT",
    b"exitcode",
    b"Root Cause (first",
    b"Watchdog caught",
    b"watchdog thread terminated",
    b"NCCL error",
    b"NVRM: Xid",
    b"oom-kill",
    b"exits with return code",
    b"Received SIGTERM",
    b"out of memory",
    b"NCCL WARN",
    b"watchdog got stuck",
    b"last enqueued",
    b"Restarting worker group",
    b"Detected mismatch between collectives",
    b"failed to pass monitoredBarrier",
    b"Fatal Python error",
    b"exited on signal",
)


_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]*(?:\x07|\x1b\\))")  # of a terminal: colors, links


def read(file: BinaryIO, most: int = WHOLE) -> tuple[str, int]:
    """Return the text of a log, and how many bytes were skipped. Each skipped part is replaced by a line '...'.

    Raise OSError if the file cannot be read.

    most: logs of up to this many bytes are read completely.
    """
    size = os.fstat(file.fileno()).st_size
    if size <= max(most, START):
        return decoded(file.read(max(most, START))), 0
    ranges = [(0, START), *_windows(file.fileno(), min(size, LARGEST)), (max(size - min(END, most), 0), size)]
    parts, end, kept = [], 0, 0
    for begin, last in sorted(ranges):
        first = max(begin, end)
        if first >= last:
            continue
        part = os.pread(file.fileno(), last - first, first)
        if first > end:  # whole lines only
            part = part[part.find(b"\n") + 1 :]
            parts.append(b"\n...\n")
        parts.append(part)
        end, kept = last, kept + len(part)
    return decoded(b"".join(parts)), size - kept


def decoded(data: bytes) -> str:
    """Return the text of a log, without color codes and without a byte-order mark."""
    text = data.decode(errors="replace").removeprefix("\ufeff")
    return _ESCAPES.sub("", text) if "\x1b" in text else text


def _windows(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Return where each part of the log that contains a failure message starts and ends."""
    found: list[tuple[int, int]] = []
    counts = dict.fromkeys(MESSAGES, 0)
    for start in range(0, size, CHUNK):
        chunk = os.pread(descriptor, CHUNK + 64, start)  # a message may extend into the next chunk
        for message in MESSAGES:
            at = chunk.find(message)
            while at >= 0 and counts[message] < MOST_WINDOWS:
                found.append((max(start + at - BEFORE, 0), min(start + at + WINDOW, size)))
                counts[message] += 1
                at = chunk.find(message, at + WINDOW)
    return found
