"""slow_files.c from Python: built, and what it has counted."""

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COUNTS = struct.Struct("QQ")  # opens, stats


def build(folder: Path) -> Path:
    """The library in `folder`, for LD_PRELOAD."""
    library = folder / "slow_files.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def start_count(path: Path) -> None:
    """Make `path` what SLOW_FILES_COUNT names; without room for both numbers one is lost in silence."""
    path.write_bytes(bytes(COUNTS.size))


def counted(path: Path) -> tuple[int, int]:
    """(opens, stats) so far."""
    opens, stats = COUNTS.unpack(path.read_bytes())
    return opens, stats
