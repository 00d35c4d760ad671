"""All ranks go on, or all of them raise: a rank that went on alone would wait for the others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hpcinit.facts.errors import CheckpointError, HpcinitError, RequestError

T = TypeVar("T")


def everywhere(work: Callable[[], T]) -> list[T]:
    """What `work`, which talks to no other rank, gave on each of them.

    Raises RequestError if that is what all failing ranks raised, CheckpointError otherwise, with the first one's words.
    """
    mine: tuple[T | None, BaseException | None] = (None, None)
    try:
        mine = (work(), None)
    except Exception as error:
        mine = (None, error)
    return gather(*mine)


def on_rank_0(work: Callable[[], T]) -> T:
    """What `work` gave on rank 0, everywhere. Raises as everywhere() does."""
    return everywhere(lambda: work() if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


def gather(value: T | None, error: BaseException | None) -> list[T]:
    """The values of all ranks. Raises as everywhere() does."""
    said = None if error is None else (socket.gethostname(), words(error), isinstance(error, RequestError))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (value, said))
    failed = [(rank, *said) for rank, (_, said) in enumerate(told) if said]
    if failed:
        rank, host, text, asked = failed[0]
        if asked:
            raise RequestError(text) from error
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise CheckpointError(f"rank {rank} on {host}{others}: {text}") from error
    return [value for value, _ in told]


def words(error: BaseException) -> str:
    """One line: torch's own errors go on with a stack of C++ frames."""
    if isinstance(error, HpcinitError):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
