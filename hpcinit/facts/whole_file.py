"""A file that is there whole or not at all, whoever reads it or is killed meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path


def write(path: Path, text: str, mode: int = 0o666) -> None:
    """Through a file beside it that takes its place, 'x.json.4242.tmp'. Raises OSError; then `path` is as it was.

    mode: of a new file, before the umask.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
