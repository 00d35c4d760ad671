"""Formats the output of `--json`: one object per line, with the name of its document and the version of the format.

docs/reference/json.md lists the documents with their fields, and a test compares them with the output of each command.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

VERSION = 1  # changes if a field is removed or changes its meaning, not if a field is added


def line(document: str, fields: Mapping[str, Any]) -> str:
    """Return `fields` as a JSON object on one line.

    document: the document's name in docs/reference/json.md.

    NaN and infinity become null.
    """
    whole = {"document": document, "version": VERSION, **fields}
    try:
        return json.dumps(whole, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(whole))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
