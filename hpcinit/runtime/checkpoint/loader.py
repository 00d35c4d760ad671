"""What belongs to the program: the place in its data, and what else it gave.

Written with torch.save and read with weights_only: plain values and tensors. Whether they can be read back is tried
before they are written, not when a later job needs them.
"""

from __future__ import annotations

import io
from collections.abc import Container
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from hpcinit.facts.errors import RequestError
from hpcinit.facts.layout import Layout
from hpcinit.runtime.checkpoint import folder as of_steps

EXTRA = "extra.pt"


@runtime_checkable
class Stateful(Protocol):
    """torchdata's StatefulDataLoader, or anything else that can tell and take its place."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def check(loader: object) -> None:
    """Raises RequestError for one that cannot tell its place."""
    if loader is not None and not isinstance(loader, Stateful):
        raise RequestError(
            f"loader is a {type(loader).__name__}, which cannot tell its place (no state_dict and load_state_dict): "
            "torchdata.stateful_dataloader.StatefulDataLoader takes the same arguments and can"
        )


def save(loader: Stateful | None, layout: Layout, rank: int, folder: Path) -> list[str]:
    """One file for each share of the data, by the first rank of those that work on it. Raises RequestError, OSError."""
    place = layout.coordinate(rank)
    if loader is None or place["pp"] or place["cp"] or place["tp"]:
        return []
    return save_plain(loader.state_dict(), _file(layout.data_rank(rank)), folder, "the loader's state_dict()")


def load(loader: Stateful, layout: Layout, rank: int, folder: Path) -> None:
    loader.load_state_dict(load_plain(folder / _file(layout.data_rank(rank))))


def is_in(files: Container[str]) -> bool:
    return _file(0) in files


def save_plain(value: Any, relative: str, folder: Path, called: str) -> list[str]:
    """Write one file and return its relative path. Raises RequestError for what could not be read back, OSError."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next(
            (line for line in lines if "Unsupported" in line), lines[0] if lines else ""
        )  # torch advises at length
        raise RequestError(
            f"{called} holds more than numbers, text, lists, dicts and tensors: it could be written and not be read "
            f"back without running what the file says ({type(error).__name__}: {why})"
        ) from error
    of_steps.write(folder / relative, stream.getvalue())
    return [relative]


def load_plain(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _file(data_rank: int) -> str:
    return f"loader/data-{data_rank:05d}.pt"
