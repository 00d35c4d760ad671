"""Finds the blocks of a model: its repeated parts, which are sharded, checkpointed and compiled one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hpcinit.base.errors import RequestError
from hpcinit.records.spec import Training
from hpcinit.train.wrap.sequence import Context


def prepare(
    model: nn.Module, chosen: Sequence[nn.Module] | None, training: Training, again: Context
) -> list[nn.Module]:
    """Apply activation checkpointing and torch.compile, if configured, to the model's blocks. Return the blocks.

    Raise RequestError if there are no blocks to apply them to, or if a module in `chosen` is not part of the model.

    chosen: the blocks that the user selected, or None to find them.
    again: a function that returns a context manager for the second forward pass of a checkpointed block.
    """
    names = _names(model, chosen) if chosen is not None else found(model)
    if not names and (training.activation_checkpointing == "full" or training.compile):
        key = "compile" if training.compile else "activation_checkpointing"
        raise RequestError(
            f"{key} applies to a model's repeated blocks, and hpcinit found none in {type(model).__name__}: list them "
            "with run.wrap(model, blocks=[...])"
        )
    made = []
    for name in names:
        block = model.get_submodule(name)
        if training.activation_checkpointing == "full":
            # torch.compile does not accept this context_fn. Only context parallelism needs one, and it refuses compile.
            contexts: dict[str, Any] = {} if again is nullcontext else {"context_fn": lambda: (nullcontext(), again())}
            block = checkpoint_wrapper(block, **contexts)
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent).register_module(last, block)
        if training.compile:
            _compile(block)  # a compiler error appears in the first step
        made.append(block)
    return made


def _compile(block: nn.Module) -> None:
    """Compile the block.

    block.compile() silently skips the code of torch's own modules. If a block has no other modules, as in
    nn.TransformerEncoderLayer, compile its forward function instead.
    """
    if all(type(module).forward.__module__.startswith("torch.nn.") for module in block.modules()):
        block.forward = torch.compile(block.forward)
    else:
        block.compile()


def found(model: nn.Module) -> list[str]:
    """Return the names of the model's blocks: the children of a ModuleList or Sequential, if all are of one class.

    Children without parameters, and blocks inside other blocks, do not count.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") or name == block for block in names)
        alike = isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in module}) == 1
        if alike and not inside and name:
            names += [
                f"{name}.{child}" for child, block in module.named_children() if any(True for _ in block.parameters())
            ]
    return names


def _names(model: nn.Module, chosen: Sequence[nn.Module]) -> list[str]:
    by_module = {module: name for name, module in model.named_modules() if name}
    for block in chosen:
        if block not in by_module:
            raise RequestError(f"blocks contains a {type(block).__name__} that is not part of {type(model).__name__}")
    return [by_module[block] for block in chosen]
