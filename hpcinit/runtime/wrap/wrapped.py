"""What run.wrap returns: one training loop for every strategy.

for x, y in loader:
    loss = F.cross_entropy(wrapped(x), y)
    wrapped.backward(loss)
    if wrapped.step():
        schedule.step()
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hpcinit.base.errors import RequestError
from hpcinit.records import wrappers
from hpcinit.records.batch import Batch
from hpcinit.runtime.wrap import states
from hpcinit.runtime.wrap.sequence import Attention, Ulysses

if TYPE_CHECKING:
    from hpcinit.records.layout import Layout
    from hpcinit.runtime.checkpoint.checkpoint_folder import Description

# Of parameters, or of groups of them as torch's optimizers take them.
MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


class Wrapped(abc.ABC):
    """A model that trains on all ranks, and its optimizer.

    model: the model itself, for its parameters and its state; with FSDP and tensor parallelism each rank holds its
    shards of them. optimizer: None if there is none. grad_norm: of all gradients of the last step before they were
    clipped; None before the first, and without gradient_clip. offloaded: states that are not on the device now.
    checkpoint_format: as facts' Wrapper has it. zero_stage: of DeepSpeed's ZeRO, None without DeepSpeed.
    scaler: of gradients in fp16, None where DeepSpeed scales them.
    """

    checkpoint_format: ClassVar[str] = wrappers.TORCH_FORMAT
    zero_stage: int | None = None
    scaler: torch.amp.GradScaler | None = None
    grad_norm: float | None = None
    offloaded: frozenset[states.State] = frozenset()

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, batch: Batch, attention: Attention) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self._attention = attention
        self._behind = 0  # passes since the optimizer's last step
        self._to_step = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; tensors of 16 bits that it returns come as float32."""
        if "lp_params" in self.offloaded:
            self.refuse_offloaded("a forward pass")
        with self._attention.forward() as mode:
            found = self._forward(self._at_boundary(), *args, **kwargs)
        if isinstance(mode, Ulysses) and not mode.calls:
            raise RequestError(
                f"parallel.cp > 1, and {type(self.model).__name__} made no call of F.scaled_dot_product_attention: its "
                "attention would see parts of sequences; have it use that (Hugging Face: attn_implementation='sdpa')"
            )
        return tree_map_only(Tensor, _in_float32, found)

    def backward(self, loss: Tensor) -> None:
        """loss: the mean over this rank's samples; averaged over the ranks and over the step's accumulation.

        Raises RequestError unless step() was called after the one before.
        """
        self.refuse_offloaded("backward()")
        if self._to_step:
            raise RequestError(
                "backward() a second time without step(): call step() after each, it knows when it is due"
            )
        with self._attention.backward():
            self._backward(loss)
        self._to_step = True

    def step(self) -> bool:
        """True if the accumulation was complete and the optimizer made its step; gradients are then zero.

        Raises RequestError without a backward() before it, or without an optimizer.
        """
        if self.optimizer is None:
            raise RequestError("step() without an optimizer: give run.wrap one, optimizer=lambda p: AdamW(p, lr=1e-3)")
        self.refuse_offloaded("step()")
        if not self._to_step:
            raise RequestError("step() without a backward() since the last: it counts the passes of the accumulation")
        complete = self._at_boundary()
        self._step(complete)
        self._to_step = False
        self._behind = 0 if complete else self._behind + 1
        return complete

    @property
    def between_steps(self) -> bool:
        """Nothing of an accumulation is under way, whose gradients a checkpoint would lose."""
        return not (self._behind or self._to_step)

    def offload_states(
        self,
        include: Collection[states.State] | None = None,
        *,
        device: Literal["cpu"] = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Between two steps: states go to the CPU's memory until reload_states(). Every rank calls it with the same.

        include: which, by DeepSpeed's names (states.STATES), None for all that can go. Of DDP and FSDP these are
        optim_states; of ZeRO all, stage 3 with deepspeed.optimizer=adamw only, or without optim_states and hp_params.
        Meanwhile nothing is trained, saved or loaded; with lp_params away there is no forward pass either.

        Raises RequestError for what cannot go.
        """
        chosen = states.checked(include, device)
        if self.optimizer is None:
            raise RequestError(
                "offload_states() without an optimizer, of which DeepSpeed and torch have the states: give run.wrap "
                "one, or deepspeed.offload_param=cpu for a model that is only evaluated in ZeRO 3"
            )
        if not self.between_steps:
            raise RequestError("offload_states() within an accumulation: after a step() that is True")
        self.offloaded |= self._offload(chosen, include is not None, pin_memory, non_blocking)

    def reload_states(self, *, non_blocking: bool = False) -> None:
        """All that offload_states() has moved, back where it was."""
        self._reload(non_blocking)
        self.offloaded = frozenset()

    def refuse_offloaded(self, what: str) -> None:
        """Raises RequestError while states are not on the device."""
        if self.offloaded:
            raise RequestError(f"{what} while {', '.join(sorted(self.offloaded))} are offloaded: reload_states() first")

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """For backward(): the mean over the tokens of all ranks, where ranks do not have equally many.

        total: the sum of this rank's losses. count: of how many tokens. A mean of each rank's own would give a token
        more weight where there are few. Averaged over the ranks, the result is the mean over all tokens of this
        forward pass; the passes of an accumulation weigh the same. Called by every rank.
        """
        counts = torch.as_tensor(count, device=total.device, dtype=torch.int64).clone()
        dist.all_reduce(counts)  # tensor parallel ranks have the same ones: they count in both numbers
        return total * (dist.get_world_size() / counts.clamp(min=1))

    def _at_boundary(self) -> bool:
        return self._behind + 1 == self.batch.accumulation

    @abc.abstractmethod
    def _forward(self, boundary: bool, *args: Any, **kwargs: Any) -> Any: ...

    @abc.abstractmethod
    def _backward(self, loss: Tensor) -> None: ...

    @abc.abstractmethod
    def _step(self, complete: bool) -> None: ...

    @abc.abstractmethod
    def _offload(
        self, chosen: frozenset[states.State], named: bool, pin_memory: bool, non_blocking: bool
    ) -> frozenset[states.State]:
        """What it moved. named: `chosen` is what the user said, each of which has to move."""

    @abc.abstractmethod
    def _reload(self, non_blocking: bool) -> None: ...

    @abc.abstractmethod
    def save_files(self, folder: Path) -> list[str]:
        """Write the model and its optimizer below `folder`; return the files of this rank, relative to it.

        Called by every rank. Raise CheckpointError on every rank if one rank cannot write.
        """

    @abc.abstractmethod
    def load_files(self, path: Path, saved: Description, layout: Layout) -> None:
        """Read what save_files() wrote below `path`, in place. Raise CheckpointError or RequestError."""


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in {torch.bfloat16, torch.float16} else tensor
