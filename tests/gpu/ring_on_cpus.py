"""A stand-in for a GPU: torch's ring attention with the CPU's attention kernel, whose name torch's dispatcher lacks.

Only that name and hpcinit's refusal are replaced. context_parallel, the ring, its order and its sums are torch's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from hpcinit.train.wrap import sequence

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
calls = {"forward": 0, "backward": 0}  # of this process


def install() -> None:
    """Make parallel.cp_kind=ring work on CPUs, in this process."""
    torchs.custom_ops[KERNEL] = _forward
    torchs.custom_ops[KERNEL_BACKWARD] = _backward
    sequence.attention = _attention


def _attention(mesh: Any, layout: Any, device: torch.device, compiled: bool) -> sequence.Attention:
    if layout.cp == 1:
        return sequence.Attention()
    ring = partial(sequence._ring, mesh["cp"], device)
    return sequence.Attention(forward=ring, backward=ring)


def _forward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
    calls["forward"] += 1
    names = ("query", "key", "value", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    return _ring(torchs._templated_ring_attention, KERNEL, given)


def _backward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
    calls["backward"] += 1
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    return _ring(torchs._templated_ring_attention_backward, KERNEL_BACKWARD, given | {"grad_out_name": "grad_out"})


def _ring(ring: Any, kernel: Any, given: dict[str, Any]) -> tuple[DTensor, ...]:
    """Call torch's ring on this rank's parts, as torch's _sdpa_handler does."""
    whole = given["query"]
    parts = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in given.items()}
    found = ring(whole.device_mesh.get_group(), 2, kernel, **parts)
    return tuple(DTensor.from_local(each, whole.device_mesh, whole.placements, run_check=False) for each in found)
