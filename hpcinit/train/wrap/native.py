"""Wraps a model with torch's own features: DDP, FSDP2, tensor parallelism, torch's optimizers and gradient clipping."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcinit.base.errors import RequestError
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Training
from hpcinit.runtime import mesh as mesh_of_run
from hpcinit.train.wrap import blocks as repeated
from hpcinit.train.wrap import states, tied
from hpcinit.train.wrap.sequence import Attention
from hpcinit.train.wrap.strategy import Inputs, Strategy
from hpcinit.train.wrap.wrapped import Wrapped, modules_with

if TYPE_CHECKING:
    from hpcinit.records.layout import Layout
    from hpcinit.train.checkpoint.checkpoint_folder import Description
    from hpcinit.train.checkpoint.staged_files import StagedFiles

# Gradient clipping: combines the gradients of parameters on different meshes into one norm.


def parameters_by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in groups, one per device mesh, because torch's foreach kernels cannot mix meshes.

    Parameters without a mesh form one group.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale the gradients so that their 2-norm is at most `most`.

    Return the norm before scaling. It is the same on every rank.
    """
    groups = [[p for p in group if p.grad is not None] for group in parameters_by_mesh(parameters)]
    norms = [
        _whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups if group
    ]
    if not norms:
        return 0.0
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, most, total)
    return float(total)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# DistributedDataParallel: every rank has the whole model; gradients are averaged during the backward pass.


def wrap_ddp(
    model: nn.Module, device: torch.device, reduce: torch.dtype
) -> tuple[Callable[..., Any], Callable[[bool], None]]:
    """Wrap the model in DDP. Return its forward function, and a function that turns gradient averaging on or off.

    Parameters and gradients stay in float32. Gradients are views of DDP's buckets, so set them to zero, not to None.

    reduce: the number format in which gradients are sent.
    """
    replica = DistributedDataParallel(
        model, device_ids=None if device.type == "cpu" else [device], gradient_as_bucket_view=True
    )
    if reduce == torch.bfloat16:
        replica.register_comm_hook(None, bf16_compress_hook)

    def synchronize(on: bool) -> None:
        replica.require_backward_grad_sync = on  # what no_sync() does as a context manager

    return replica, synchronize


# FSDP2: fully_shard over the ranks of a mesh, with replicas over the other ranks (HSDP).


def fsdp_meshes(
    mesh: DeviceMesh, layout: Layout, device: torch.device, sharded: bool
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh for fully_shard, and the tensor parallel mesh or None.

    If `sharded` is False, hpcinit uses fully_shard instead of DDP, because DDP would convert DTensors in each forward
    pass. The last dimension of the mesh then has size 1, so fully_shard does not divide the parameters. Ranks with
    different parts of a sequence count as data parallel.
    """
    found = mesh_of_run.mesh_part(mesh, "dp_replicate", "fsdp") if sharded else None
    if found is not None:
        return found, mesh_of_run.mesh_part(mesh, "tp")
    shape = (dist.get_world_size() // layout.tp, 1, layout.tp)
    own = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    return own["dp_replicate", "dp_shard"], own["tp"]


def wrap_fsdp(
    model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, param: torch.dtype, reduce: torch.dtype
) -> tuple[Callable[..., Any], Callable[[bool], None]]:
    """Shard the model with FSDP.

    Return its forward function, and a function that turns gradient averaging on or off.

    Blocks are sharded one by one, so that only one block's parameters are gathered at a time. The other parameters are
    sharded together. Between steps, parameters are in float32.

    param: the number format of gathered parameters.
    """
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if not isinstance(model, FSDPModule):
        raise TypeError(f"fully_shard did not turn {type(model).__name__} into an FSDPModule")
    return model, model.set_requires_gradient_sync


# All ranks start with equal weights.


@torch.no_grad()
def start_same_on_all_ranks(model: nn.Module, device: torch.device) -> None:
    """Copy rank 0's parameters and buffers to every rank, as DDP does.

    Without this, fully_shard would make shards of different models if ranks have different seeds. Raise RequestError
    for a model on the meta device.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RequestError(
                f"{name} is on the meta device and has no data: create the model on run.device or the CPU"
            )
        if dist.get_world_size() > 1:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)


# Tensor parallelism: torch's API divides layers by a plan.


def divide_tensors(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Divide the model among the tensor parallel ranks, in place.

    Raise RequestError if a name in `plan` matches no module. torch itself would only print a warning.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in plan:
        if not any(_matches(name, pattern) for name in names):
            near = ", ".join(sorted(name for name in names if name.count(".") == pattern.count("."))[:6])
            raise RequestError(
                f"tp_plan names {pattern!r}, but no module has this name; the modules are: {near or names[:6]}"
            )
    parallelize_module(model, mesh, dict(plan))


def _matches(name: str, pattern: str) -> bool:
    """Return whether the name matches the pattern. As in parallelize_module, * does not match a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DDP(Strategy):
    """Wraps a model in DDP.

    With tensor parallelism, fully_shard replaces DDP, but data parallel ranks still have equal parameters.
    """

    shards_data = False  # whether parameters are divided among the data parallel ranks

    def check(self, inputs: Inputs) -> None:
        if inputs.layout.tp > 1 and not inputs.tp_plan:
            raise RequestError(
                f"parallel.tp is {inputs.layout.tp}, but run.wrap got no tp_plan: list the layers to shard, as in "
                "tp_plan={'blocks.*.up': ColwiseParallel(), ...}, or use parallel.tp=1"
            )

    def wrap(self, inputs: Inputs, attention: Attention) -> Wrapped:
        model, device, training = inputs.model, inputs.device, inputs.training
        sharded = self.shards_data or inputs.layout.tp > 1
        _check_precision(training, device, sharded)
        param, reduce = DTYPES[training.precision.param], DTYPES[training.precision.reduce]
        start_same_on_all_ranks(model, device)
        forward: Callable[..., Any] = model
        synchronize: Callable[[bool], None] = _ignore
        if sharded:
            before = tied.ties(model)
            data, divided = fsdp_meshes(inputs.mesh, inputs.layout, device, self.shards_data)
            if divided is not None and inputs.tp_plan:
                divide_tensors(model, divided, inputs.tp_plan)
            parts = repeated.prepare(model, inputs.blocks, training, attention.again)
            forward, synchronize = wrap_fsdp(model, parts, data, param, reduce)
            tied.refuse_broken(before)
            param = torch.float32  # fully_shard casts automatically, so Native must not
        else:
            repeated.prepare(model.to(device), inputs.blocks, training, attention.again)
            if dist.get_world_size() > 1:
                forward, synchronize = wrap_ddp(model, device, reduce)
        optimizer = inputs.optimizer(_groups(model)) if inputs.optimizer else None
        return Native(
            model, optimizer, inputs.batch, attention, forward, synchronize, device, param, training.gradient_clip
        )


class FSDP(DDP):
    """Shards a model over the data parallel ranks, with FSDP2 (fully_shard)."""

    shards_data = True

    def check(self, inputs: Inputs) -> None:
        super().check(inputs)
        for problem in inputs.training.wrapper.problems(inputs.layout):
            raise RequestError(problem)


class Unwrapped(DDP):
    """Leaves the model unwrapped, for a single rank."""

    def check(self, inputs: Inputs) -> None:
        if dist.get_world_size() > 1:
            raise RequestError(
                f"parallel.wrap is none with {dist.get_world_size()} ranks: their gradients would not be combined. "
                "Wrap the model yourself, or use parallel.wrap=ddp, fsdp or deepspeed"
            )
        super().check(inputs)


def _ignore(synchronize: bool) -> None:
    """Do nothing, because a single rank has nothing to average."""


def _groups(model: nn.Module) -> list[Any]:
    """Return the parameters to train, in one group per mesh if they are on different meshes."""
    groups = parameters_by_mesh(p for p in model.parameters() if p.requires_grad)
    return groups[0] if len(groups) == 1 else [{"params": group} for group in groups]


def _check_precision(training: Training, device: torch.device, sharded: bool) -> None:
    if training.precision.reduce == "bf16" and device.type == "cpu" and not sharded:
        raise RequestError(
            "precision.reduce=bf16 does not work with parallel.wrap=ddp on a CPU; use precision.reduce=fp32"
        )
    if training.precision.param != "fp16":
        return
    if device.type == "cpu" or sharded:
        where = "on a CPU" if device.type == "cpu" else "with parallel.wrap=fsdp or tensor parallelism"
        raise RequestError(
            f"precision.param=fp16 does not work {where}: the gradients are not scaled there, so small ones would "
            "become 0; use precision.param=bf16"
        )


class Native(Wrapped):
    """A model that is wrapped with torch alone, without DeepSpeed.

    scaler: scales the loss and gradients in fp16. With other number formats, it does nothing.
    """

    scaler: torch.amp.GradScaler

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Batch,
        attention: Attention,
        forward: Callable[..., Any],
        synchronize: Callable[[bool], None],
        device: torch.device,
        dtype: torch.dtype,
        gradient_clip: float,
    ) -> None:
        super().__init__(model, optimizer, batch, attention)
        self._run, self._synchronize = forward, synchronize
        self._device, self._dtype, self._clip = device, dtype, gradient_clip
        self._moved: states.Moved = []
        self._in_buckets = isinstance(forward, DistributedDataParallel)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def _forward(self, boundary: bool, *args: Any, **kwargs: Any) -> Any:
        self._synchronize(boundary)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            return self._run(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss / self.batch.accumulation))

    def _step(self, complete: bool) -> None:
        if not complete or self.optimizer is None:
            return
        if self._clip:
            self.scaler.unscale_(self.optimizer)
            self.grad_norm = clip_gradients(self.model.parameters(), self._clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self._in_buckets)

    def _offload(
        self, chosen: frozenset[states.State], named: bool, pin_memory: bool, non_blocking: bool
    ) -> frozenset[states.State]:
        if others := chosen - {"optim_states"} if named else ():
            raise RequestError(
                f"offload_states() cannot move {', '.join(sorted(others))} with parallel.wrap=ddp or fsdp, only "
                "optim_states. Use parallel.wrap=deepspeed for the others"
            )
        if "optim_states" in chosen and self.optimizer is not None:
            self._moved += states.to_cpu(self.optimizer, pin_memory, non_blocking)
        return chosen & {"optim_states"}

    def _reload(self, non_blocking: bool) -> None:
        states.back(self._moved, non_blocking)
        self._moved = []

    def whole_weights(self, wanted: Collection[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for _, tensors in modules_with(self.model, wanted):
            for tensor in tensors:
                yield tensor, _whole(tensor.detach())

    def save_files(self, folder: Path, staged: StagedFiles | None = None) -> list[str]:
        from hpcinit.train.checkpoint import native_checkpoint  # noqa: PLC0415 - takes a second to import, only for a save

        return native_checkpoint.save_native(self.model, self.optimizer, folder, staged)

    def load_files(self, path: Path, saved: Description, layout: Layout) -> None:
        from hpcinit.train.checkpoint import native_checkpoint  # noqa: PLC0415 - as above

        native_checkpoint.load_native(self.model, self.optimizer, path)
