"""Quotes values for shell scripts, so that the shell never runs them, and formats command-line options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# A name that means the same in Slurm's file name patterns, in a path and in a shell.
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
OPTION_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+|[a-z0-9]{2,}")  # a long option of sbatch or srun, without dashes
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def unsafe(text: str) -> str | None:
    """Return why `text` is not allowed in an #SBATCH line, or None if it is allowed.

    sbatch reads directives line by line and understands '...' and "..." as quotes (opt.c:
    _get_next_opt_from_batch_script). A newline ends the directive, and the shell runs what follows. A NUL ends the
    script. An unmatched quote is an error.
    """
    for character in text:
        # Unicode's line ends (NEL, LS, PS) are unsafe too, because only some programs end a line there. Surrogates
        # represent bytes that are not UTF-8, and cannot be written.
        if ord(character) < 32 or character in "\x7f\x85\u2028\u2029" or "\ud800" <= character <= "\udfff":
            return f"contains the control character {character!r}"
    for quote in "'\"":
        if text.count(quote) % 2:
            return f"contains an unbalanced {quote}"
    return None


def directive(text: str) -> str:
    """Escape backslashes in `text` for an #SBATCH line. Quote the result afterwards.

    Even within '...', sbatch reads \\x as x (Slurm 22.05 and 24.11).
    """
    return text.replace("\\", "\\\\")


def unsafe_path(path: str) -> str | None:
    """Return why `path` is not allowed in an #SBATCH line, or None if it is allowed.

    A backslash is not allowed, because it disables Slurm's replacements such as %j.
    """
    return unsafe(path) or ("contains a backslash" if "\\" in path else None)


class Raw(str):
    """Text that the shell is meant to interpret. All other text gets quoted."""

    __slots__ = ()


def shell(text: str) -> str:
    """Return `text` quoted as one argument of a shell command, or unchanged if it is Raw."""
    return text if isinstance(text, Raw) else shlex.quote(text)


def joined(separator: str, texts: Sequence[str]) -> str:
    """Join `texts` with `separator`. The result is Raw if any of the texts is Raw."""
    if any(isinstance(text, Raw) for text in texts):
        return Raw(separator.join(map(shell, texts)))
    return separator.join(texts)


def pattern(path: str) -> str:
    """Escape `path` for Slurm's file name patterns, where %% means a percent sign."""
    return path.replace("%", "%%")


def option_flags(options: Mapping[str, Any]) -> list[str]:
    """Return command-line options such as ['--nodes=2', '--unbuffered'] from a table.

    True becomes an option without a value. None and False are skipped.
    """
    return [
        f"--{name}" if value is True else joined("", [f"--{name}=", value if isinstance(value, str) else str(value)])
        for name, value in options.items()
        if value is not None and value is not False
    ]
