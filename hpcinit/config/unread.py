"""Which keys refer to which: interpolations, and keys added with a plus that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcinit.config import keys as schema

FREE = ("deepspeed.ds_config.", "deepspeed.optimizer_params.")  # tables that go to DeepSpeed whole, however deep


def keys(added: Sequence[str], document: Any, chosen: Mapping[str, str]) -> Iterator[str]:
    """A warning for each +key that neither hpcinit nor any other key reads.

    added: overrides with a plus. document: the config with its interpolations as written. chosen: group -> choice,
    as +experiment=x is one.
    """
    written = [raw for _, raw in references(document)]
    for override in added:
        key = override.lstrip("+").partition("=")[0]
        if key in chosen or schema.kind(key) is not None or key.startswith(("hydra", *FREE)):
            continue
        if not any(key in raw for raw in written):
            near = schema.guess(key.rpartition(".")[2], schema.beside(key))
            yield f"{override}: nothing reads {key}, neither hpcinit nor another key with ${{{key}}}{near}"


def references(document: Any) -> Iterator[tuple[str, str]]:
    """Every (key, text) whose text has an interpolation in it."""
    return ((key, text) for key, text in texts(document) if "${" in text)


def texts(document: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every (key, text) of a config as plain containers."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield from texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(document, list):
        for at, value in enumerate(document):
            yield from texts(value, f"{key}[{at}]")
    elif isinstance(document, str):
        yield key, document
