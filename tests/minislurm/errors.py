"""The error of this package, and quotes from a daemon's log."""

from pathlib import Path


class MiniSlurmError(RuntimeError):
    """The cluster could not be made, or did not react in time."""


def quoted(log: Path, lines: int = 15) -> str:
    """Return the end of a log for a message: '/.../log/n3.log ends with: ...'."""
    try:
        text = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"{log}: not readable ({error.strerror})"
    if not text:
        return f"{log}: empty"
    return "\n  ".join([f"{log} ends with:", *text[-lines:]])
