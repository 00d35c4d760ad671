"""The repeated parts of a model, which are sharded, checkpointed and compiled one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hpcinit.base.errors import RequestError
from hpcinit.records.spec import Training
from hpcinit.runtime.wrap.sequence import Context


def prepare(
    model: nn.Module, chosen: Sequence[nn.Module] | None, training: Training, again: Context
) -> list[nn.Module]:
    """The blocks, as they now stand in the model: checkpointed and compiled if so asked.

    again: stands around a checkpointed block that runs again. Raises RequestError.
    """
    names = _names(model, chosen) if chosen is not None else found(model)
    if not names and (training.activation_checkpointing == "full" or training.compile):
        key = "compile" if training.compile else "activation_checkpointing"
        raise RequestError(
            f"{key} is set, and {type(model).__name__} shows no repeated blocks: name them, blocks=[...]"
        )
    made = []
    for name in names:
        block = model.get_submodule(name)
        if training.activation_checkpointing == "full":
            # torch.compile accepts no such context_fn. Only context parallelism needs one, and it is never compiled.
            contexts: dict[str, Any] = {} if again is nullcontext else {"context_fn": lambda: (nullcontext(), again())}
            block = checkpoint_wrapper(block, **contexts)
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent).register_module(last, block)
        if training.compile:
            _compile(block)  # an error of the compiler comes up in the first step
        made.append(block)
    return made


def _compile(block: nn.Module) -> None:
    """block.compile() passes over the code of torch's own modules, and says nothing: of a block that is nothing else,
    as a bare nn.TransformerEncoderLayer, it compiles nothing. Its forward named by itself is compiled."""
    if all(type(module).forward.__module__.startswith("torch.nn.") for module in block.modules()):
        block.forward = torch.compile(block.forward)
    else:
        block.compile()


def found(model: nn.Module) -> list[str]:
    """Names of the children of each outermost ModuleList or Sequential whose children are all of one class."""
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
            raise RequestError(f"blocks has a {type(block).__name__} that is no part of {type(model).__name__}")
    return [by_module[block] for block in chosen]
