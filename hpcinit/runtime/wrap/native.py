"""DDP, FSDP2, tensor parallelism and a model alone: torch's own wrappers, with torch's optimizers and clipping."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from hpcinit.runtime.wrap import blocks as repeated
from hpcinit.runtime.wrap import states
from hpcinit.runtime.wrap.sequence import Attention
from hpcinit.runtime.wrap.strategy import Inputs, Strategy
from hpcinit.runtime.wrap.wrapped import Wrapped

if TYPE_CHECKING:
    from hpcinit.records.layout import Layout
    from hpcinit.runtime.checkpoint.checkpoint_folder import Description

# The norm of all gradients, over parameters that are divided in different ways.


def parameters_by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that lie on the same mesh together, those on none too: torch's foreach kernels refuse a mixture."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale the gradients so that their 2-norm is at most `most`; the norm that they had, the same on every rank."""
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


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# DistributedDataParallel: the whole model on every rank, gradients averaged while the backward pass runs.


def wrap_ddp(
    model: nn.Module, device: torch.device, reduce: torch.dtype
) -> tuple[Callable[..., Any], Callable[[bool], None]]:
    """The forward, and what says before it whether its gradients are averaged over the ranks.

    Parameters and gradients stay in float32, gradients in the buckets that are sent: to be zeroed in place, as those of
    a first pass of an accumulation would else get memory of their own beside them. reduce: what gradients are sent in.
    """
    replica = DistributedDataParallel(
        model, device_ids=None if device.type == "cpu" else [device], gradient_as_bucket_view=True
    )
    if reduce == torch.bfloat16:
        replica.register_comm_hook(None, bf16_compress_hook)

    def synchronise(on: bool) -> None:
        replica.require_backward_grad_sync = on  # all that no_sync() does, which would have to be held open

    return replica, synchronise


# FSDP2: fully_shard over the ranks of a mesh, and copies of that over the others (HSDP).


def fsdp_meshes(
    mesh: DeviceMesh, layout: Layout, device: torch.device, sharded: bool
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Over which ranks parameters are copied and sharded, and the tensor parallel ranks; they have one parent.

    Parts of a sequence count as data. Not sharded, each rank of the data has them whole: fully_shard then takes a mesh
    whose last dimension is 1. (DDP itself takes no DTensors but by turning them into others in each forward.)
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
    """The forward, and what says before it whether its gradients are averaged over the ranks.

    Block by block, so that one block's parameters at a time are whole; what is left is sharded with the model itself.
    Between steps parameters are in float32. param: what they are gathered and computed in.
    """
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if not isinstance(model, FSDPModule):
        raise TypeError(f"fully_shard made no FSDPModule of {type(model).__name__}")
    return model, model.set_requires_gradient_sync


# Equal weights to begin with.


@torch.no_grad()
def start_same_on_all_ranks(model: nn.Module, device: torch.device) -> None:
    """Rank 0's parameters and buffers, on every rank.

    DDP does so by itself. fully_shard keeps of each rank's parameters its own shard: with other seeds on other ranks it
    would put together a model that nobody has made. Raises RequestError for a model without data.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RequestError(
                f"{name} is on the meta device and has no data: build the model on run.device or the CPU"
            )
        if dist.get_world_size() > 1:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)


# Tensor parallelism: layers divided by a plan, through torch's own API.


def divide_tensors(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
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


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DDP(Strategy):
    """DDP; together with tensor parallelism fully_shard, in which each data parallel rank keeps whole parameters."""

    shards_data = False  # among the data parallel ranks

    def check(self, inputs: Inputs) -> None:
        if inputs.layout.tp > 1 and not inputs.tp_plan:
            raise RequestError(
                f"parallel.tp is {inputs.layout.tp} and run.wrap was given no tp_plan: which layers are divided, and "
                "how? tp_plan={'blocks.*.up': ColwiseParallel(), ...}, or parallel.tp=1"
            )

    def wrap(self, inputs: Inputs, attention: Attention) -> Wrapped:
        model, device, training = inputs.model, inputs.device, inputs.training
        sharded = self.shards_data or inputs.layout.tp > 1
        _check_precision(training, device, sharded)
        param, reduce = DTYPES[training.precision.param], DTYPES[training.precision.reduce]
        start_same_on_all_ranks(model, device)
        forward: Callable[..., Any] = model
        synchronise: Callable[[bool], None] = _ignore
        if sharded:
            data, divided = fsdp_meshes(inputs.mesh, inputs.layout, device, self.shards_data)
            if divided is not None and inputs.tp_plan:
                divide_tensors(model, divided, inputs.tp_plan)
            parts = repeated.prepare(model, inputs.blocks, training, attention.again)
            forward, synchronise = wrap_fsdp(model, parts, data, param, reduce)
            param = torch.float32  # fully_shard casts by itself
        else:
            repeated.prepare(model.to(device), inputs.blocks, training, attention.again)
            if dist.get_world_size() > 1:
                forward, synchronise = wrap_ddp(model, device, reduce)
        optimizer = inputs.optimizer(_groups(model)) if inputs.optimizer else None
        return Native(
            model, optimizer, inputs.batch, attention, forward, synchronise, device, param, training.gradient_clip
        )


class FSDP(DDP):
    """fully_shard over the data parallel ranks."""

    shards_data = True

    def check(self, inputs: Inputs) -> None:
        super().check(inputs)
        for problem in inputs.training.wrapper.problems(inputs.layout):
            raise RequestError(problem)


class Unwrapped(DDP):
    """One rank, which has nothing to combine."""

    def check(self, inputs: Inputs) -> None:
        if dist.get_world_size() > 1:
            raise RequestError(
                f"parallel.wrap is none with {dist.get_world_size()} ranks: nothing would keep them together; "
                "wrap the model yourself, or parallel.wrap=ddp, fsdp or deepspeed"
            )
        super().check(inputs)


def _ignore(synchronise: bool) -> None:
    """One rank has nothing to average."""


def _groups(model: nn.Module) -> list[Any]:
    """Parameters, in groups where they lie on different meshes."""
    groups = parameters_by_mesh(p for p in model.parameters() if p.requires_grad)
    return groups[0] if len(groups) == 1 else [{"params": group} for group in groups]


def _check_precision(training: Training, device: torch.device, sharded: bool) -> None:
    if training.precision.reduce == "bf16" and device.type == "cpu" and not sharded:
        raise RequestError(
            "precision.reduce is bf16 with parallel.wrap=ddp on a CPU, where torch's DDP cannot: precision.reduce=fp32"
        )
    if training.precision.param != "fp16":
        return
    if device.type == "cpu" or sharded:
        where = "on a CPU" if device.type == "cpu" else "with parallel.wrap=fsdp or tensor parallelism"
        raise RequestError(
            f"precision.param is fp16 {where}, where gradients are not scaled against its small range: bf16"
        )


class Native(Wrapped):
    """scaler: of gradients in fp16; it does nothing in other precisions."""

    scaler: torch.amp.GradScaler

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Batch,
        attention: Attention,
        forward: Callable[..., Any],
        synchronise: Callable[[bool], None],
        device: torch.device,
        dtype: torch.dtype,
        gradient_clip: float,
    ) -> None:
        super().__init__(model, optimizer, batch, attention)
        self._run, self._synchronise = forward, synchronise
        self._device, self._dtype, self._clip = device, dtype, gradient_clip
        self._moved: states.Moved = []
        self._in_buckets = isinstance(forward, DistributedDataParallel)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def _forward(self, boundary: bool, *args: Any, **kwargs: Any) -> Any:
        self._synchronise(boundary)
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
                f"offload_states() has {', '.join(sorted(others))} with parallel.wrap=ddp or fsdp, whose optim_states "
                "alone can go; the others with parallel.wrap=deepspeed"
            )
        if "optim_states" in chosen and self.optimizer is not None:
            self._moved += states.to_cpu(self.optimizer, pin_memory, non_blocking)
        return chosen & {"optim_states"}

    def _reload(self, non_blocking: bool) -> None:
        states.back(self._moved, non_blocking)
        self._moved = []

    def save_files(self, folder: Path) -> list[str]:
        from hpcinit.runtime.checkpoint import native_checkpoint  # noqa: PLC0415 - a second to import, for those who save

        return native_checkpoint.save_native(self.model, self.optimizer, folder)

    def load_files(self, path: Path, saved: Description, layout: Layout) -> None:
        from hpcinit.runtime.checkpoint import native_checkpoint  # noqa: PLC0415 - as above

        native_checkpoint.load_native(self.model, self.optimizer, path)
