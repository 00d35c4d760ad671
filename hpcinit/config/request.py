"""One request, composed: what a task of `compose.main` is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcinit.config.schema import Config


@dataclass(frozen=True)
class Request:
    """A Config and where it came from.

    document: the config as plain containers. combination: in a sweep, the overrides that make it this one, else ''.
    warnings: what was not refused and is worth a look, one sentence each. number: its place in the sweep, from 0.
    """

    config: Config
    document: dict[str, Any]
    combination: str
    warnings: Sequence[str]
    number: int = 0


@dataclass(frozen=True)
class Composer:
    """How a primary config is composed with overrides, for those who do it many times.

    compose: overrides to Hydra's config. request: of such a config, its overrides and combination. unusable: the errors
    that a wrong override raises.
    """

    name: str
    compose: Callable[[Sequence[str]], Any]
    request: Callable[[Any, Sequence[str], str], Request]
    unusable: tuple[type[Exception], ...]


Prepare = Callable[[Request], None]  # changes a request or refuses it with an HpcinitError
Task = Callable[[Sequence[Request]], int]  # -> exit status
