"""Defines key(), which declares a config key as a field of a dataclass."""

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
    """Declare a config key. `--help`, the reference page, the checks and the messages are made from this declaration.

    The name of a key with a unit ends in the unit: _s, _min, _h, _gb or _mb.

    help: the description in `--help` and in the reference.
    least, above, most: the bounds of a number. A key declared as Optional can always be null.
    choices: the values that are allowed.
    filled: the expected value, for messages, such as 'a name'. If it is set, the key does not accept ''.
    sbatch: the sbatch option that gets the value unchanged.
    owns: other options of sbatch and srun that hpcinit sets from this key.
    """
    about = {
        "help": help,
        **{"least": least, "above": above, "most": most, "choices": choices},
        **{"filled": filled, "sbatch": sbatch, "owns": owns},
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)
