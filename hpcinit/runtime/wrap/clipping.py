"""The norm of all gradients, over parameters that are divided in different ways."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that lie on the same mesh together, those on none too: torch's foreach kernels refuse a mixture."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale the gradients so that their 2-norm is at most `most`; the norm that they had, the same on every rank."""
    groups = [[p for p in group if p.grad is not None] for group in by_mesh(parameters)]
    norms = [
        _whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups if group
    ]
    if not norms:
        return 0.0
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, most, total)
    return float(total)


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
