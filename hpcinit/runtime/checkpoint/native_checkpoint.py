"""Checkpoints of DDP, FSDP, HSDP and tensor parallelism by torch.distributed.checkpoint, and agreements of ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from hpcinit.base.errors import CheckpointError, HpcinitError, RequestError
from hpcinit.rendezvous.process_state import state
from hpcinit.runtime import process_group
from hpcinit.runtime.checkpoint import checkpoint_folder as of_steps

# All ranks go on, or all of them raise: a rank that went on alone would wait for the others.

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


def agreement_group() -> ProcessGroup | None:
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
    return gather_answers(*mine)


def on_rank_0(work: Callable[[], T]) -> T:
    """What `work` gave on rank 0, everywhere. Raises as everywhere() does."""
    return everywhere(lambda: work() if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


def gather_answers(value: T | None, error: BaseException | None) -> list[T]:
    """The values of all ranks. Raises as everywhere() does."""
    said = (
        None
        if error is None
        else (socket.gethostname(), exception_text(error), isinstance(error, RequestError), quoted(error))
    )
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (value, said), agreement_group())
    failed = [(rank, *said) for rank, (_, said) in enumerate(told) if said]
    if failed:
        rank, host, text, asked, theirs = failed[0]
        if asked:
            raise RequestError(text, quoted=theirs) from error
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        message = f"rank {rank} on {host}{others}: {text}"
        raise CheckpointError(message, rank_at_fault=rank, host_at_fault=host, quoted=theirs) from error
    return [value for value, _ in told]


def exception_text(error: BaseException) -> str:
    """One line: torch's own errors go on with a stack of C++ frames."""
    if isinstance(error, HpcinitError):
        return str(error)
    return f"{type(error).__name__}: {quoted(error)}"


def quoted(error: BaseException) -> str:
    """What words() has of another program's message."""
    return error.quoted if isinstance(error, HpcinitError) else str(error).strip().partition(chr(10))[0]


FOLDER = "dcp"
# Settings of each parameter by its name, not by the group that it was in: with another mesh there are other groups.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_native(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> list[str]:
    """The files that this rank wrote into `folder`. Raises CheckpointError, on every rank if it does so on one."""
    try:
        state_dict_saver.save(
            _state(model, optimizer),
            storage_writer=FileSystemWriter(folder / FOLDER),
            process_group=agreement_group(),
        )
    except CheckpointException as error:
        raise _told(error) from error
    mine = [f"{FOLDER}/__{dist.get_rank()}_*"]
    return of_steps.matching(folder, *mine, *([f"{FOLDER}/.metadata"] if dist.get_rank() == 0 else []))


def load_native(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    """Into both, in place. Raises CheckpointError for a model or an optimizer that is not the one that was saved."""
    state = _state(model, optimizer)
    try:
        state_dict_loader.load(state, storage_reader=FileSystemReader(folder / FOLDER), process_group=agreement_group())
    except CheckpointException as error:
        told = _told(error)
        message = f"{folder} does not fit this model and optimizer: {told}"
        raise CheckpointError(message, quoted=told.quoted) from error
    set_state_dict(
        model,
        optimizer or [],
        model_state_dict=state["model"],
        optim_state_dict=state.get("optimizer", {}),
        options=_OPTIONS,
    )


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer or [], options=_OPTIONS)
    return {"model": of_model, "optimizer": of_optimizer} if optimizer else {"model": of_model}


def _told(error: CheckpointException) -> CheckpointError:
    """The first failed rank's own words, without the stacks of all of them."""
    rank, (cause, _) = min(error.failures.items())
    first = str(cause).strip().partition(chr(10))[0]
    return CheckpointError(f"rank {rank}: {type(cause).__name__}: {first}", quoted=first)
