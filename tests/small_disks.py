"""Small real file systems (tmpfs) for tests, and files that fill them to the last byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.skip_or_fail import skip_or_fail


@contextmanager
def small_disk(place: Path, options: str = "size=1m") -> Iterator[Path]:
    """Create the folder `place` and mount a tmpfs there; unmount it at the end. `options` are those of mount -o."""
    if os.geteuid() != 0:
        skip_or_fail("needs root: mounts a file system")
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "hpcinit", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(place: Path) -> Path:
    """Fill the disk of `place` with a file and return it. Remove the file to free the space."""
    other = place / "other"
    for size in (1 << 20, 4096, 1):
        try:
            with other.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(size))
        except OSError:
            continue
    return other
