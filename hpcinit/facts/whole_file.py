"""A file that is there whole or not at all, whoever reads it or is killed meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Through a file beside it that takes its place, 'x.json.4242.tmp'. Raises OSError; then `path` is as it was."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
