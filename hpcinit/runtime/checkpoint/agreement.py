"""All ranks go on, or all of them raise: a rank that went on alone would wait for the others."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hpcinit.facts.errors import CheckpointError, HpcinitError, RequestError
from hpcinit.runtime import process_group
from hpcinit.runtime.process_state import state

T = TypeVar("T")


@contextmanager
def patient(timeout: timedelta) -> Iterator[None]:
    """Let ranks wait for each other for `timeout`, while one of them writes or reads. Called by every rank.

    All groups get it, and what they had again at the end: DeepSpeed waits in the default group.
    """
    with process_group.timeouts_of_at_least(timeout):
        if dist.get_world_size() == 1:
            state.checkpoint_group = None
        elif (known := state.checkpoint_group) is None or known not in c10d._world.pg_map:
            # There is none yet, or it was destroyed with the default group that it was made for.
            state.checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            process_group.set_timeout(timeout, known)
        yield


def group() -> ProcessGroup | None:
    """Return the group in which ranks agree within patient(), None for the default one.

    It is gloo's, on the CPU: NCCL would guess a device for a barrier.
    """
    return state.checkpoint_group


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
    said = (
        None if error is None else (socket.gethostname(), words(error), isinstance(error, RequestError), quoted(error))
    )
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (value, said), group())
    failed = [(rank, *said) for rank, (_, said) in enumerate(told) if said]
    if failed:
        rank, host, text, asked, theirs = failed[0]
        if asked:
            raise RequestError(text, quoted=theirs) from error
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        message = f"rank {rank} on {host}{others}: {text}"
        raise CheckpointError(message, rank_at_fault=rank, host_at_fault=host, quoted=theirs) from error
    return [value for value, _ in told]


def words(error: BaseException) -> str:
    """One line: torch's own errors go on with a stack of C++ frames."""
    if isinstance(error, HpcinitError):
        return str(error)
    return f"{type(error).__name__}: {quoted(error)}"


def quoted(error: BaseException) -> str:
    """What words() has of another program's message."""
    return error.quoted if isinstance(error, HpcinitError) else str(error).strip().partition(chr(10))[0]
