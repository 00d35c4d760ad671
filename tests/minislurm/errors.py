"""The one error of this package, and how a daemon's log gets into it."""

from pathlib import Path


class MiniSlurmError(RuntimeError):
    """The cluster could not be made, or did not do in time what was asked of it."""


def quoted(log: Path, lines: int = 15) -> str:
    """The end of a log as it goes into a message: '/.../log/n3.log ends with: ...'."""
    try:
        text = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"{log}: not readable ({error.strerror})"
    if not text:
        return f"{log}: empty"
    return "\n  ".join([f"{log} ends with:", *text[-lines:]])
