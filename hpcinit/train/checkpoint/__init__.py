"""Saves and loads checkpoints. A checkpoint is complete or does not exist, and any number of ranks can load it.

FOLDER/.owner.json                     the job that may publish checkpoints here
       step-00000042/checkpoint.json   a description, with the size and checksum of every file
                     dcp/              torch.distributed.checkpoint: ddp, fsdp, tensor parallelism
                     deepspeed/        DeepSpeed's format; universal/ is added when another number of ranks loads it.
                     loader/           the loader's position, one file per share of the data
                     random/           states of the random generators, one file per rank
                     extra.pt          the values that the program passed

torch and DeepSpeed read both formats with pickle, so load only checkpoints that you trust.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcinit.train.checkpoint.save_and_load import CheckpointError, Loaded, load, save

__all__ = ["CheckpointError", "Loaded", "load", "save"]


def __getattr__(name: str) -> Any:
    # The process that writes checkpoints imports modules of this package, and should not import torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("hpcinit.train.checkpoint.save_and_load"), name)
