"""DDP, FSDP, HSDP and tensor parallelism: torch.distributed.checkpoint, which re-shards as it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from hpcinit.facts.errors import CheckpointError
from hpcinit.runtime.checkpoint import agreement
from hpcinit.runtime.checkpoint import folder as of_steps

FOLDER = "dcp"
# Settings of each parameter by its name, not by the group that it was in: with another mesh there are other groups.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> list[str]:
    """The files that this rank wrote into `folder`. Raises CheckpointError, on every rank if it does so on one."""
    try:
        state_dict_saver.save(
            _state(model, optimizer),
            storage_writer=FileSystemWriter(folder / FOLDER),
            process_group=agreement.group(),
        )
    except CheckpointException as error:
        raise _told(error) from error
    mine = [f"{FOLDER}/__{dist.get_rank()}_*"]
    return of_steps.matching(folder, *mine, *([f"{FOLDER}/.metadata"] if dist.get_rank() == 0 else []))


def load(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    """Into both, in place. Raises CheckpointError for a model or an optimizer that is not the one that was saved."""
    state = _state(model, optimizer)
    try:
        state_dict_loader.load(state, storage_reader=FileSystemReader(folder / FOLDER), process_group=agreement.group())
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
