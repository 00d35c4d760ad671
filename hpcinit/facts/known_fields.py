"""Records that another version of hpcinit may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def made(kind: type[T], document: Mapping[str, Any]) -> T:
    """The dataclass `kind` of what it has fields for; what a later version has added is left out.

    Raises TypeError where a field without a default is missing, AttributeError where `document` is no mapping.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in document.items() if key in known})
