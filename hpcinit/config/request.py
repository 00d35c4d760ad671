"""One request, composed: what a task of `compose.main` is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpcinit.config.schema import Config
from hpcinit.facts.errors import HpcinitError
from hpcinit.facts.result import Value


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


class Search(Protocol):
    """Who submits what a sweeper asks for, batch after batch, and tells it what each came to."""

    def batch(self, requests: Sequence[Request]) -> Sequence[Value | HpcinitError]:
        """Submitted and waited for: of each its result, or why there is none. Raises Ended where nobody waits."""

    def end(self, written: Path) -> int:
        """The sweeper has found what it was to find, and left files in the folder `written`. The exit status."""

    def interrupted(self) -> int:
        """Ctrl-C between two batches. The exit status."""


class Ended(Exception):
    """A search that ends early, and has said why."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
