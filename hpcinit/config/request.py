"""Defines Request (a Config with what the user typed), and the interfaces for composing and submitting requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpcinit.base.errors import HpcinitError
from hpcinit.config.schema import Config

if TYPE_CHECKING:
    from hpcinit.records.results import Value

NAME = "hpcinit"  # the name of the primary config: conf/hpcinit.yaml
PLAIN = (bool, int, float, str, type(None))
KeyPath = tuple[str | int, ...]  # ("job", "args", 1)


def as_text(value: object) -> str:
    """Return a single value as YAML and Hydra write it: 'true' instead of 'True'."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Request:
    """A Config and what the user typed to get it.

    document: the config as plain containers.
    combination: in a sweep, the overrides that differ between the requests, as one text; otherwise ''.
    warnings: one sentence each.
    number: the request's position in the sweep, from 0.
    typed: for each key with a single value, the text that the user typed.
    parameters: the overrides in `combination`, as a list.
    given: what the user typed before `--`.
    """

    config: Config
    document: dict[str, Any]
    combination: str
    warnings: list[str]
    number: int = 0
    typed: Mapping[str, str] = field(default_factory=dict)
    parameters: Sequence[str] = ()
    given: Sequence[str] = ()
    unread: dict[str, str] = field(default_factory=dict)  # added keys that have no effect so far, each with a warning


@dataclass(frozen=True)
class Composer:
    """Composes one primary config with different overrides.

    compose: returns Hydra's config for overrides.
    request: makes a Request from a config, its overrides and its combination.
    unusable: the exceptions to expect if an override is invalid.
    """

    name: str
    compose: Callable[[Sequence[str]], Any]
    request: Callable[[Any, Sequence[str], str], Request]
    unusable: tuple[type[Exception], ...]


Prepare = Callable[[Request], None]  # changes a request, or raises HpcinitError
Task = Callable[[Sequence[Request]], int]  # -> exit status


class Search(Protocol):
    """Submits the batches of trials that a hyperparameter sweeper requests, and returns their results to it."""

    def batch(self, requests: Sequence[Request]) -> Sequence[Value | HpcinitError]:
        """Submit a batch of trials and wait. Return the result of each trial, or the error that prevented it.

        Raise Ended to end the search.
        """

    def end(self, written: Path) -> int:
        """Finish the search and return the exit status.

        written: the folder in which the sweeper wrote its files.
        """

    def interrupted(self) -> int:
        """Handle Ctrl-C between two batches. Return the exit status of the command."""


class Ended(Exception):
    """Raised to end a hyperparameter search early. The reason has already been printed."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
