"""Declares one config key as a field of a dataclass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from typing import Any


def key(
    help: str,
    default: Any = None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Collection[str | None] = (),
    filled: str = "",
    sbatch: str = "",
    owns: str = "",
) -> Any:
    """Declare a key. `--help`, the reference page, the checks and the messages all use this declaration.

    The name of a key with a unit ends in it: _s, _min, _h, _gb, _mb. least, above, most: the bounds of a number. An
    Optional key may always be null. filled: what a message expects instead of ''. sbatch: the option that takes the
    value unchanged. owns: other options of sbatch and srun that hpcinit derives from this key.
    """
    about = {
        "help": help,
        **{"least": least, "above": above, "most": most, "choices": choices},
        **{"filled": filled, "sbatch": sbatch, "owns": owns},
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)
