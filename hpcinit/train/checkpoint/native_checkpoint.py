"""Saves and loads checkpoints of DDP, FSDP, HSDP and tensor parallelism, with torch.distributed.checkpoint.

It also has functions that report a failure on one rank to all ranks.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from hpcinit.base.errors import CheckpointError, HpcinitError, RequestError
from hpcinit.runtime import process_group
from hpcinit.runtime.process_state import state
from hpcinit.train.checkpoint import checkpoint_folder
from hpcinit.train.checkpoint.staged_files import StagedFiles

# If one rank fails, all ranks raise an error. Otherwise, the remaining ranks would wait for the failed one.

T = TypeVar("T")


@contextmanager
def patient(timeout: timedelta) -> Iterator[None]:
    """In this block, let ranks wait for each other for up to `timeout`, for example while one rank writes.

    Every rank must call this. The timeouts of all groups are raised, because DeepSpeed waits in the default group.
    """
    with process_group.timeouts_of_at_least(timeout):
        if dist.get_world_size() == 1:
            state.checkpoint_group = None
        elif (known := state.checkpoint_group) is None or known not in c10d._world.pg_map:
            # There is no group yet, or it was destroyed with the default group.
            state.checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            process_group.set_timeout(timeout, known)
        yield


def agreement_group() -> ProcessGroup | None:
    """Return the process group for the collectives of a save or load, or None for the default group.

    The group uses gloo, because NCCL would have to guess a device for a barrier. Call this within patient().
    """
    return state.checkpoint_group


def everywhere(work: Callable[[], T]) -> list[T]:
    """Call `work` on every rank, and return the results of all ranks. `work` must not communicate.

    If it fails on any rank, raise an error on every rank, with the message of the lowest failed rank. The error is a
    RequestError if that rank raised one, else a CheckpointError.
    """
    try:
        result, problem = work(), None
    except Exception as error:
        result, problem = None, error
    return gather_answers(result, problem)


def on_rank_0(work: Callable[[], T]) -> T:
    """Call `work` on rank 0 and return its result on every rank. Raise the same errors as everywhere()."""
    return everywhere(lambda: work() if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


def gather_answers(value: T | None, error: BaseException | None) -> list[T]:
    """Exchange the value or the error of each rank, and return the values of all ranks.

    Raise the same errors as everywhere().
    """
    mine = None
    if error is not None:
        mine = socket.gethostname(), exception_text(error), isinstance(error, RequestError), quoted(error)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (value, mine), agreement_group())
    failed = [(rank, *failure) for rank, (_, failure) in enumerate(answers) if failure]
    if failed:
        rank, host, text, is_request_error, message_of_other = failed[0]
        if is_request_error:
            raise RequestError(text, quoted=message_of_other) from error
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        message = f"rank {rank} on {host}{others}: {text}"
        raise CheckpointError(message, rank_at_fault=rank, host_at_fault=host, quoted=message_of_other) from error
    return [value for value, _ in answers]


def exception_text(error: BaseException) -> str:
    """Return the error as text on one line, without torch's stack of C++ frames."""
    if isinstance(error, HpcinitError):
        return str(error)
    return f"{type(error).__name__}: {quoted(error)}"


def quoted(error: BaseException) -> str:
    """Return the part of the error's message that another program wrote."""
    return error.quoted if isinstance(error, HpcinitError) else str(error).strip().partition(chr(10))[0]


FOLDER = "dcp"
# Store the optimizer's settings per parameter, not per group, because another layout may have other groups.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_native(
    model: nn.Module, optimizer: Optimizer | None, folder: Path, staged: StagedFiles | None = None
) -> list[str]:
    """Save the model and the optimizer into `folder`, or into memory (`staged`). Return this rank's files.

    If one rank fails, raise CheckpointError on every rank.
    """
    in_memory = None if staged is None else _InMemory(staged)
    writer = FileSystemWriter(folder / FOLDER, sync_files=in_memory is None)
    checksums = torch.serialization.get_crc32_options()
    if in_memory is not None:
        writer.fs = in_memory
        torch.serialization.set_crc32_options(False)  # slower than the copy; checkpoint.json has checksums anyway
    try:
        state_dict_saver.save(_state(model, optimizer), storage_writer=writer, process_group=agreement_group())
    except CheckpointException as error:
        raise _first_failure(error) from error
    finally:
        torch.serialization.set_crc32_options(checksums)
    if in_memory is not None:
        return in_memory.names
    mine = [f"{FOLDER}/__{dist.get_rank()}_*"]
    return checkpoint_folder.matching(folder, *mine, *([f"{FOLDER}/.metadata"] if dist.get_rank() == 0 else []))


class _InMemory(FileSystem):
    """The file system of a FileSystemWriter that writes into memory.

    names: the relative paths that the files have in the checkpoint.
    """

    def __init__(self, staged: StagedFiles) -> None:
        self._staged, self.names = staged, list[str]()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        # torch writes .metadata.tmp and renames it.
        self.names.append(f"{FOLDER}/{Path(path).name.removesuffix('.tmp')}")
        yield self._staged.open(self.names[-1])

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the writer process creates the folder."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Do nothing: create_stream() has already given the file its final name."""


def load_native(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    """Load the files into the model and the optimizer, in place. Raise CheckpointError if they do not match."""
    state = _state(model, optimizer)
    try:
        state_dict_loader.load(state, storage_reader=FileSystemReader(folder / FOLDER), process_group=agreement_group())
    except CheckpointException as error:
        cause = _first_failure(error)
        message = f"{folder} does not match this model and optimizer: {cause}"
        raise CheckpointError(message, quoted=cause.quoted) from error
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


def _first_failure(error: CheckpointException) -> CheckpointError:
    """Return an error with the message of the first failed rank, without the stacks of all ranks."""
    rank, (cause, _) = min(error.failures.items())
    first = str(cause).strip().partition(chr(10))[0]
    return CheckpointError(f"rank {rank}: {type(cause).__name__}: {first}", quoted=first)
