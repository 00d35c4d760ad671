"""Quote values that go into a script: they are data, never shell code. Also command-line flags from a table."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# What a file name pattern of Slurm's, a path and a shell agree on.
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
OPTION_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+|[a-z0-9]{2,}")  # a long option of sbatch or srun, without dashes
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def unsafe(text: str) -> str | None:
    """Why `text` cannot stand in an #SBATCH line, or None if it can.

    sbatch reads a directive line by line and knows '...' and "..." (opt.c: _get_next_opt_from_batch_script):
    a newline ends the directive and what follows is run, NUL ends the script, an unmatched quote is fatal.
    """
    for character in text:
        # Line ends of Unicode too (NEL, LS, PS): programs do not agree on whether they end a line. Surrogates stand
        # for bytes that are not UTF-8, and cannot be written.
        if ord(character) < 32 or character in "\x7f\x85\u2028\u2029" or "\ud800" <= character <= "\udfff":
            return f"contains the control character {character!r}"
    for quote in "'\"":
        if text.count(quote) % 2:
            return f"contains an unbalanced {quote}"
    return None


def directive(text: str) -> str:
    """`text` for an #SBATCH line, before it is quoted: sbatch takes \\x for x, even within '...' (22.05 and 24.11)."""
    return text.replace("\\", "\\\\")


def unsafe_path(path: str) -> str | None:
    """Why `path` cannot stand in an #SBATCH line. A backslash switches all of Slurm's replacements off."""
    return unsafe(path) or ("contains a backslash" if "\\" in path else None)


class Raw(str):
    """A word that the shell interprets; every other text is quoted."""

    __slots__ = ()


def shell(text: str) -> str:
    """Return `text` as one word of a shell command; what is Raw stays as it is."""
    return text if isinstance(text, Raw) else shlex.quote(text)


def joined(separator: str, texts: Sequence[str]) -> str:
    """Return `texts` as one word with `separator` between them, which is Raw if any of them is."""
    if any(isinstance(text, Raw) for text in texts):
        return Raw(separator.join(map(shell, texts)))
    return separator.join(texts)


def pattern(path: str) -> str:
    """`path` with what Slurm would replace in a file name pattern taken literally: %% is a percent sign."""
    return path.replace("%", "%%")


# Options of a command, from a table.


def option_flags(options: Mapping[str, Any]) -> list[str]:
    """['--nodes=2', '--unbuffered']: true is a bare flag, None and false leave an option out."""
    return [
        f"--{name}" if value is True else joined("", [f"--{name}=", value if isinstance(value, str) else str(value)])
        for name, value in options.items()
        if value is not None and value is not False
    ]
