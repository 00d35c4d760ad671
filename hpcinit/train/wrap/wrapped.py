"""Defines Wrapped, which run.wrap() returns. The same training loop works with every wrapper:

for x, y in loader:
    loss = F.cross_entropy(wrapped(x), y)
    wrapped.backward(loss)
    if wrapped.step():
        schedule.step()
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hpcinit.base.errors import RequestError
from hpcinit.records import wrappers
from hpcinit.records.batch import Batch
from hpcinit.train.wrap import states
from hpcinit.train.wrap.sequence import Attention, Ulysses

if TYPE_CHECKING:
    from hpcinit.records.layout import Layout
    from hpcinit.train.checkpoint.checkpoint_folder import Description
    from hpcinit.train.checkpoint.staged_files import StagedFiles

# A function that gets parameters or parameter groups, like torch's optimizers, and returns an optimizer.
MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


class Wrapped(abc.ABC):
    """A model that all ranks train together, and its optimizer.

    Attributes:
        model: the model itself, with its parameters and state. With FSDP and tensor parallelism it has only this rank's
            shards.
        optimizer: the optimizer, or None.
        grad_norm: 2-norm of all gradients in the last step, before clipping. None before the first step, and without
            gradient_clip.
        offloaded: names of the states that are not on the device now.
        checkpoint_format: the format of checkpoints, see records/wrappers.py.
        zero_stage: stage of DeepSpeed's ZeRO, or None without DeepSpeed.
        scaler: the gradient scaler for fp16, or None if DeepSpeed scales the gradients.
    """

    checkpoint_format: ClassVar[str] = wrappers.TORCH_FORMAT
    zero_stage: int | None = None
    scaler: torch.amp.GradScaler | None = None
    grad_norm: float | None = None
    offloaded: frozenset[states.State] = frozenset()

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, batch: Batch, attention: Attention) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self._attention = attention
        self._behind = 0  # backward passes since the optimizer's last step
        self._to_step = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's forward function. If the function returns 16-bit tensors, convert them to float32.

        Raise RequestError if lp_params are offloaded, or if context parallelism is on but the model does not use
        F.scaled_dot_product_attention.
        """
        if "lp_params" in self.offloaded:
            self.refuse_offloaded("the model")
        with self._attention.forward() as mode:
            found = self._forward(self._at_boundary(), *args, **kwargs)
        if isinstance(mode, Ulysses) and not mode.calls:
            raise RequestError(
                f"{type(self.model).__name__} did not call F.scaled_dot_product_attention, but parallel.cp > 1: its "
                "attention would see only parts of sequences. Call this function (Hugging Face: "
                "attn_implementation='sdpa')"
            )
        return tree_map_only(Tensor, _in_float32, found)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`. They are averaged over the ranks and over the passes of an accumulation.

        Raise RequestError if step() was not called after the last backward().

        Args:
            loss: the mean over this rank's samples, a scalar tensor.
        """
        self.refuse_offloaded("backward()")
        if self._to_step:
            raise RequestError(
                "backward() was called twice without step(): call step() after every backward(), even during "
                "gradient accumulation"
            )
        with self._attention.backward():
            self._backward(loss)
        self._to_step = True

    def step(self) -> bool:
        """Take an optimizer step, zero the gradients and return True. During an accumulation, only return False.

        Raise RequestError if backward() was not called since the last step(), or if there is no optimizer.
        """
        if self.optimizer is None:
            raise RequestError("step() needs an optimizer: call run.wrap(model, optimizer=lambda p: AdamW(p, lr=1e-3))")
        self.refuse_offloaded("step()")
        if not self._to_step:
            raise RequestError(
                "step() was called without a backward() before it: call backward() and step() in turn, even during "
                "gradient accumulation"
            )
        complete = self._at_boundary()
        self._step(complete)
        self._to_step = False
        self._behind = 0 if complete else self._behind + 1
        return complete

    @property
    def between_steps(self) -> bool:
        """Return whether no accumulation is in progress. A checkpoint during an accumulation would lose gradients."""
        return not (self._behind or self._to_step)

    def offload_states(
        self,
        include: Collection[states.State] | None = None,
        *,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to the CPU's memory until reload_states() is called. Call this between two steps, on every rank.

        While states are offloaded, the model cannot be trained, saved or loaded. If lp_params are offloaded, a forward
        pass is not possible either. Raise RequestError if a state cannot be moved.

        Args:
            include: the states to move, by DeepSpeed's names: optim_states, hp_params, lp_params, lp_grads,
                contiguous_grad_buffer. None: all that can be moved. DDP and FSDP can move only optim_states. ZeRO can
                move all of them. In stage 3, optim_states and hp_params need deepspeed.optimizer=adamw. If
                deepspeed.offload_optimizer or offload_param is set, nothing is moved, and hpcinit prints a message.
            pin_memory: move to pinned memory, which is faster to copy.
            non_blocking: return before the copies are done.
        """
        chosen = states.checked(include)
        if self.optimizer is None:
            raise RequestError(
                "offload_states() works only with an optimizer: pass one to run.wrap. To evaluate a model with ZeRO "
                "3, use deepspeed.offload_param=cpu instead"
            )
        if not self.between_steps:
            raise RequestError(
                "offload_states() was called during gradient accumulation; call it after step() returned True"
            )
        self.offloaded |= self._offload(chosen, include is not None, pin_memory, non_blocking)

    def reload_states(self, *, non_blocking: bool = False) -> None:
        """Move all offloaded states back to the device.

        Args:
            non_blocking: return before the copies are done.
        """
        self._reload(non_blocking)
        self.offloaded = frozenset()

    def refuse_offloaded(self, what: str) -> None:
        """Raise RequestError if states are offloaded.

        what: the operation that is not possible then, for the message.
        """
        if self.offloaded:
            raise RequestError(
                f"cannot call {what} while {', '.join(sorted(self.offloaded))} are offloaded; "
                "call reload_states() first"
            )

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return the loss for backward() if ranks have different numbers of tokens. Each token has the same weight.

        The result is total * n / T for n ranks with T tokens in all. All passes of an accumulation have equal weights.
        Every rank must call it.

        Args:
            total: the sum of this rank's token losses.
            count: this rank's number of tokens.
        """
        counts = torch.as_tensor(count, device=total.device, dtype=torch.int64).clone()
        dist.all_reduce(counts)  # tensor parallelism multiplies this sum and the world size by the same factor
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
        """Move the states to the CPU and return those that were moved.

        named: whether the user chose the states, so that each of them must be moved.
        """

    @abc.abstractmethod
    def _reload(self, non_blocking: bool) -> None: ...

    def check_export(self) -> None:  # noqa: B027 - torch's wrappers have nothing to refuse
        """Raise RequestError if the complete model weights cannot be collected."""

    @abc.abstractmethod
    def whole_weights(self, wanted: Collection[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter and buffer together with its complete tensor.

        Each complete tensor is valid only until the next one is yielded. Every rank must iterate to the end, because
        the ranks communicate.

        Args:
            wanted: the id() of each parameter and buffer to yield. Others in the same module may be yielded too.
        """

    @abc.abstractmethod
    def save_files(self, folder: Path, staged: StagedFiles | None = None) -> list[str]:
        """Write the model and its optimizer into files below `folder`. Return the relative paths of this rank's files.

        Every rank must call it. If one rank cannot write, raise CheckpointError on every rank.

        Args:
            folder: the folder of the unfinished checkpoint.
            staged: the files in memory to write into, instead of `folder`. Only for wrappers with torch's format.
        """

    @abc.abstractmethod
    def load_files(self, path: Path, saved: Description, layout: Layout) -> None:
        """Load the files that save_files() wrote below `path` into the model and the optimizer, in place.

        Raise CheckpointError if they do not match the model, and RequestError if they cannot be converted to this
        layout.
        """


def modules_with(model: nn.Module, wanted: Collection[int]) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield each module that directly contains a wanted tensor, together with all tensors that it directly contains.

    wanted: the id() of each wanted parameter and buffer.
    """
    for module in model.modules():
        mine = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(id(tensor) in wanted for tensor in mine):
            yield module, mine


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in {torch.bfloat16, torch.float16} else tensor
