"""Options of a command, from a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcinit.facts.quoting import joined


def flags(options: Mapping[str, Any]) -> list[str]:
    """['--nodes=2', '--unbuffered']: true is a bare flag, None and false leave an option out."""
    return [
        f"--{name}" if value is True else joined("", [f"--{name}=", value if isinstance(value, str) else str(value)])
        for name, value in options.items()
        if value is not None and value is not False
    ]
