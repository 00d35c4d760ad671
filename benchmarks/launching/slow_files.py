"""Build slow_files.c and read its counters."""

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COUNTS = struct.Struct("QQ")  # opens, stats


def build(folder: Path) -> Path:
    """Build the library in `folder`, for LD_PRELOAD."""
    library = folder / "slow_files.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def start_count(path: Path) -> None:
    """Create the file for SLOW_FILES_COUNT, with space for both counters."""
    path.write_bytes(bytes(COUNTS.size))


def counted(path: Path) -> tuple[int, int]:
    """Return the counters (opens, stats)."""
    opens, stats = COUNTS.unpack(path.read_bytes())
    return opens, stats
