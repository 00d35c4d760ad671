"""Tensor parallelism: layers divided by a plan, through torch's own API."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from hpcinit.facts.errors import RequestError


def divide(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """In place. mesh: the tensor parallel one. Raises RequestError for a name that no module has.

    torch only warns of one, and trains the layer whole.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in plan:
        if not any(_matches(name, pattern) for name in names):
            near = ", ".join(sorted(name for name in names if name.count(".") == pattern.count("."))[:6])
            raise RequestError(f"tp_plan has {pattern!r}, and no module is called so; there are {near or names[:6]}")
    parallelize_module(model, mesh, dict(plan))


def _matches(name: str, pattern: str) -> bool:
    """As parallelize_module does it: part by part, so that * does not reach over a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
