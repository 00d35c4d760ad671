"""Sequence (context) parallelism: each rank of a group has a part of every sequence, and attention sees it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from hpcinit.base.errors import RequestError
from hpcinit.records.layout import Layout

Context = Callable[[], AbstractContextManager[Any]]
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # those that have a position


def shard(layout: Layout, rank: int, *tensors: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
    """This rank's part of each tensor along `dim`: tokens, targets, and positions, which the model has to be given.

    All ranks of a group begin with the same tensors. Raises RequestError unless the length is a multiple of cp, or of
    2 x cp for a ring, where a rank has a piece from the front and one from the back: equal work under a causal mask.
    """
    pieces = layout.cp * (2 if layout.cp_kind == "ring" and layout.cp > 1 else 1)
    place = layout.coordinate(rank)["cp"]
    mine = [place] if pieces == layout.cp else [place, pieces - 1 - place]
    found = []
    for tensor in tensors:
        if length := tensor.shape[dim] % pieces:
            near = f"{tensor.shape[dim] - length} or {tensor.shape[dim] - length + pieces}"
            raise RequestError(
                f"a sequence of {tensor.shape[dim]} cannot be divided into {pieces} equal pieces (parallel.cp is "
                f"{layout.cp}): pad or cut it to {near}, and count only real tokens in the loss (wrapped.mean)"
            )
        cut = tensor.chunk(pieces, dim)
        found.append(torch.cat([cut[each] for each in mine], dim) if len(mine) > 1 else cut[place])
    return tuple(found)


@dataclass(frozen=True)
class Attention:
    """What stands around a forward pass, a backward pass, and a checkpointed block that runs again in the latter.

    With it F.scaled_dot_product_attention works on whole sequences, given queries, keys and values of a part.
    """

    forward: Context = nullcontext
    backward: Context = nullcontext
    again: Context = nullcontext


def attention(mesh: DeviceMesh, layout: Layout, device: torch.device, compiled: bool) -> Attention:
    """mesh: of the run. Raises RequestError for what does not work here."""
    if layout.cp == 1:
        return Attention()
    if compiled:
        raise RequestError(
            "compile is true with parallel.cp > 1, whose attention torch.compile does not see: one of them"
        )
    if layout.cp_kind == "ulysses":
        whole = partial(Ulysses, mesh["cp"])
        return Attention(forward=whole, again=whole)  # backward() pops a TorchFunctionMode that stands around it
    if device.type == "cpu":
        raise RequestError("parallel.cp_kind is ring on a CPU, for which torch has none: parallel.cp_kind=ulysses")
    ring = partial(_ring, mesh["cp"], device)
    return Attention(forward=ring, backward=ring)


@contextmanager
def _ring(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415 - prototype, may move

    # It insists on a tensor to divide, and divides for equal work as shard() does.
    length = torch.arange(2 * mesh.size(), device=device)
    with context_parallel(mesh, buffers=[length], buffer_seq_dims=[0], no_restore_buffers={length}):
        yield


class Ulysses(TorchFunctionMode):
    """All-to-all around attention: from all heads of a part to some heads of the whole (DeepSpeed-Ulysses, 2309.14509).

    Sees calls of F.scaled_dot_product_attention alone.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        given = dict(zip(_ARGUMENTS, args, strict=False)) | dict(kwargs or {})
        if given.get("attn_mask") is not None:
            raise RequestError(
                "attention with a mask under parallel.cp > 1: a part of the mask does not tell the whole"
            )
        parts = [given.pop(name) for name in ("query", "key", "value")]
        return self._back(func(*map(self._whole, parts), **given))

    def _whole(self, x: Tensor) -> Tensor:
        """(..., heads, part, width) to (..., heads / cp, whole, width)."""
        ranks = self._mesh.size()
        if x.shape[-3] % ranks:
            raise RequestError(
                f"{x.shape[-3]} attention heads on a rank cannot be divided among parallel.cp {ranks} ranks (Ulysses): "
                "choose a divisor, or parallel.cp_kind=ring"
            )
        pieces = self._exchange(torch.stack(x.chunk(ranks, -3)))
        return torch.cat(pieces.unbind(), -2)

    def _back(self, x: Tensor) -> Tensor:
        pieces = self._exchange(torch.stack(x.chunk(self._mesh.size(), -2)))
        return torch.cat(pieces.unbind(), -3)

    def _exchange(self, x: Tensor) -> Tensor:
        """x[i] goes to rank i of the group; result[i] came from it."""
        return all_to_all_single_autograd(x.contiguous(), None, None, self._mesh.get_group())
