"""Implements context parallelism: each rank has a part of every sequence, but attention works on whole sequences."""

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
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # the positional arguments


def shard(layout: Layout, rank: int, *tensors: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
    """Return this rank's part of each tensor along `dim`. Use it for tokens, targets and positions.

    All ranks of a group must pass equal tensors. For ring attention, each rank gets a piece from the front and a piece
    from the back, so that all ranks have the same work under a causal mask.

    Raise RequestError if the length is not a multiple of cp, or of 2 x cp for ring attention.
    """
    pieces = layout.cp * (2 if layout.cp_kind == "ring" and layout.cp > 1 else 1)
    place = layout.coordinate(rank)["cp"]
    mine = [place] if pieces == layout.cp else [place, pieces - 1 - place]
    found = []
    for tensor in tensors:
        if length := tensor.shape[dim] % pieces:
            near = f"{tensor.shape[dim] - length} or {tensor.shape[dim] - length + pieces}"
            raise RequestError(
                f"a sequence of length {tensor.shape[dim]} cannot be divided into {pieces} equal pieces (parallel.cp "
                f"is {layout.cp}): pad or cut it to {near}, and count only real tokens in the loss (wrapped.mean)"
            )
        cut = tensor.chunk(pieces, dim)
        found.append(torch.cat([cut[each] for each in mine], dim) if len(mine) > 1 else cut[place])
    return tuple(found)


@dataclass(frozen=True)
class Attention:
    """Context managers for the forward pass, the backward pass, and the second forward pass of checkpointed blocks.

    Inside them, each rank passes its part of the sequence to F.scaled_dot_product_attention, which then works on the
    whole sequence.
    """

    forward: Context = nullcontext
    backward: Context = nullcontext
    again: Context = nullcontext


def attention(mesh: DeviceMesh, layout: Layout, device: torch.device, compiled: bool) -> Attention:
    """Return the context managers that this layout needs. Raise RequestError if a setting is not supported.

    mesh: the mesh of the run.
    """
    if layout.cp == 1:
        return Attention()
    if compiled:
        raise RequestError(
            "compile=true does not work with parallel.cp > 1, because torch.compile does not see that hpcinit replaces "
            "the attention function. Use compile=false or parallel.cp=1"
        )
    if layout.cp_kind == "ulysses":
        whole = partial(Ulysses, mesh["cp"])
        return Attention(forward=whole, again=whole)  # no mode around backward(), which would pop an outer mode
    if device.type == "cpu":
        raise RequestError(
            "parallel.cp_kind=ring does not work on a CPU, because torch's context_parallel does not support attention "
            "there; use parallel.cp_kind=ulysses"
        )
    ring = partial(_ring, mesh["cp"], device)
    return Attention(forward=ring, backward=ring)


@contextmanager
def _ring(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415 - a prototype API, may move

    # context_parallel requires a tensor to divide; it divides in the same order as shard().
    length = torch.arange(2 * mesh.size(), device=device)
    with context_parallel(mesh, buffers=[length], buffer_seq_dims=[0], no_restore_buffers={length}):
        yield


class Ulysses(TorchFunctionMode):
    """Makes F.scaled_dot_product_attention work on whole sequences, as in DeepSpeed-Ulysses (arXiv:2309.14509).

    Before each call, a rank has all heads for a part of the sequence. The ranks exchange data, and each then has some
    of the heads for the whole sequence. After the call, they exchange the result back.
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
            raise RequestError("attn_mask does not work with parallel.cp > 1: each rank has only a part of the mask")
        parts = [given.pop(name) for name in ("query", "key", "value")]
        return self._back(func(*map(self._whole, parts), **given))

    def _whole(self, x: Tensor) -> Tensor:
        """Exchange data between the ranks: (..., heads, part, width) becomes (..., heads / cp, whole, width)."""
        ranks = self._mesh.size()
        if x.shape[-3] % ranks:
            raise RequestError(
                f"{x.shape[-3]} attention heads per rank cannot be divided among {ranks} ranks (parallel.cp, Ulysses): "
                "set parallel.cp to a divisor of the number of heads, or use parallel.cp_kind=ring"
            )
        pieces = self._exchange(torch.stack(x.chunk(ranks, -3)))
        return torch.cat(pieces.unbind(), -2)

    def _back(self, x: Tensor) -> Tensor:
        pieces = self._exchange(torch.stack(x.chunk(self._mesh.size(), -2)))
        return torch.cat(pieces.unbind(), -3)

    def _exchange(self, x: Tensor) -> Tensor:
        """Send x[i] to rank i of the group, and receive result[i] from it."""
        return all_to_all_single_autograd(x.contiguous(), None, None, self._mesh.get_group())
