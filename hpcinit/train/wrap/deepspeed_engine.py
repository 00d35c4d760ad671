"""Wraps a model in DeepSpeed's engine, undoes the engine's extra first step, and moves its states to the CPU."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from hpcinit.base.console import say
from hpcinit.base.errors import RequestError
from hpcinit.base.versions import key
from hpcinit.deepspeed import deepspeed_config, deepspeed_versions
from hpcinit.records import wrappers
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.runtime import deepspeed_setup as starting
from hpcinit.runtime import ops, process_group
from hpcinit.train.wrap import blocks as repeated
from hpcinit.train.wrap import tied
from hpcinit.train.wrap.sequence import Attention
from hpcinit.train.wrap.states import State
from hpcinit.train.wrap.strategy import Inputs, Strategy
from hpcinit.train.wrap.wrapped import Wrapped, modules_with

if TYPE_CHECKING:
    from hpcinit.train.checkpoint.checkpoint_folder import Description
    from hpcinit.train.checkpoint.staged_files import StagedFiles

# With ZeRO 0 in 16 bits, DeepSpeed makes an extra optimizer step at the start, to allocate all memory.


@torch.no_grad()
def undo_first_step(engine: Any) -> None:
    """Undo the extra step that DeepSpeed makes at the start with ZeRO 0 in 16 bits. In other cases, do nothing.

    The extra step has zero gradients, but it increases Adam's step count. The bias correction is then wrong, and the
    first steps are a quarter shorter. AdamW also applies weight decay once too often. See initialize_optimizer_states
    in runtime/fp16/unfused_optimizer.py and fused_optimizer.py (0.18.5 and 0.19.8).
    """
    wrapper = engine.optimizer
    if type(wrapper).__name__ not in {"FP16_Optimizer", "FP16_UnfusedOptimizer"}:
        return
    if hasattr(wrapper, "fp32_groups_flat"):
        masters, models = wrapper.fp32_groups_flat, wrapper.fp16_groups_flat
    else:
        masters, models = (
            [p for group in groups for p in group] for groups in (wrapper.fp32_groups, wrapper.fp16_groups)
        )
    for master, model in zip(masters, models, strict=True):
        master.copy_(model)
    wrapper.optimizer.state.clear()


# If DeepSpeed cannot move a state, it fails with an assertion or does nothing, so hpcinit checks the states first.

_OF_OPTIMIZER: frozenset[State] = frozenset({"optim_states", "hp_params"})


def off_the_device(engine: Any) -> str:
    """Return the config key that makes DeepSpeed offload states permanently, or '' if none is set.

    With such a key, DeepSpeed 0.18.5 cannot move any state (an assertion fails). DeepSpeed 0.19.8 can move the
    remaining states.
    """
    found = {"offload_param": engine.zero_offload_param(), "offload_optimizer": engine.zero_offload_optimizer()}
    return next((f"deepspeed.{name}" for name, value in found.items() if _device(value) != "none"), "")


def check_movable(engine: Any, chosen: frozenset[State]) -> None:
    """Raise RequestError if one of the states cannot be moved to the CPU."""
    stage = int(engine.zero_optimization_stage())
    if stage == 0:
        raise RequestError("offload_states() does not work with deepspeed.zero_stage 0: use stage 1, 2 or 3")
    if not hasattr(engine.optimizer, "offload_states"):  # stage 1 with data_types.grad_accum_dtype: BF16_Optimizer
        raise RequestError(
            f"offload_states() does not work with DeepSpeed's {type(engine.optimizer).__name__}. Use "
            "deepspeed.zero_stage=2, or remove data_types from deepspeed.ds_config"
        )
    if stage != 3 or _fused(engine):
        return
    optimizer, version = type(engine.optimizer.optimizer).__name__, starting.deepspeed_version()
    if key(version) < key(deepspeed_versions.MOVES_WITHOUT_FUSED_ADAM_SINCE):
        raise RequestError(
            f"offload_states() cannot move the states of {optimizer}: with deepspeed.zero_stage 3, DeepSpeed "
            f"{version} supports only its FusedAdam optimizer. Use deepspeed.optimizer=adamw on GPUs. To move only "
            f"lp_params and lp_grads, install DeepSpeed {deepspeed_versions.MOVES_WITHOUT_FUSED_ADAM_SINCE} or later"
        )
    if chosen & _OF_OPTIMIZER:
        raise RequestError(
            f"offload_states() cannot move optim_states and hp_params of {optimizer}: with deepspeed.zero_stage 3, "
            "DeepSpeed supports this only for its FusedAdam optimizer. Use deepspeed.optimizer=adamw on GPUs, or "
            "move only the other states: include=['lp_params', 'lp_grads', 'contiguous_grad_buffer']"
        )


def offload_zero_states(
    engine: Any, chosen: frozenset[State], pin_memory: bool, non_blocking: bool
) -> frozenset[State]:
    """Move the chosen states to the CPU. Return the names of the states that DeepSpeed has moved."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum  # noqa: PLC0415 - takes a second to import

    wanted = [OffloadStateTypeEnum(name) for name in sorted(chosen)]
    pins = engine.device.type != "cpu" or key(starting.deepspeed_version()) >= key(deepspeed_versions.PINS_ON_CPU_SINCE)
    pin_memory = pin_memory and pins
    engine.offload_states(include=wanted, pin_memory=pin_memory, non_blocking=non_blocking)
    return frozenset(name for name in chosen if OffloadStateTypeEnum(name) in engine.optimizer.offloaded_states)


def _fused(engine: Any) -> bool:
    from deepspeed.ops.adam import FusedAdam  # noqa: PLC0415 - as above

    return type(engine.optimizer.optimizer) is FusedAdam


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


# If optimizer states are offloaded, hpcinit uses DeepSpeed's CPUAdam, provided that its op is built.

FORCE = "zero_force_ds_cpu_optimizer"  # DeepSpeed's key in a ds_config; false keeps the program's optimizer
_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")
_OF_TORCH = {*_UNSUPPORTED, "foreach", "fused", "decoupled_weight_decay"}  # group keys that CPUAdam lacks


def _with_cpu_adam(
    optimizer: Optimizer, config: Mapping[str, Any], chosen: Mapping[str, Any], device: torch.device
) -> Optimizer:
    """If possible, replace torch's Adam or AdamW with DeepSpeed's CPUAdam. Return the optimizer to use.

    Every rank must call this. The states must be offloaded, and every node must have built CPUAdam's op. If only the op
    is missing, rank 0 prints how to build it.

    config: the config of DeepSpeed's engine.
    chosen: the part of the config that the user has set.
    """
    offload = deepspeed_versions.at(config, "zero_optimization.offload_optimizer.device")
    if offload not in {"cpu", "nvme"} or chosen.get(FORCE) is False or not _replaceable(optimizer):
        return optimizer
    name = type(optimizer).__name__
    built = torch.tensor([int(ops.is_built("cpu_adam"))], device=device)
    dist.all_reduce(built, op=dist.ReduceOp.MIN)  # other nodes may have other compiled ops
    if not built:
        _say_on_rank_0(
            f"the offloaded optimizer is torch's {name}. For the faster CPUAdam, run: hpcinit build-ops --ops cpu_adam"
        )
        return optimizer
    ops.prepare({**config, "optimizer": {"type": "AdamW"}}, device.type)
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415 - takes a second to import

    groups = [{key: value for key, value in group.items() if key not in _OF_TORCH} for group in optimizer.param_groups]
    adam: Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=isinstance(optimizer, AdamW))
    keep = f"deepspeed.ds_config.{FORCE}=false keeps torch's optimizer"
    _say_on_rank_0(f"the offloaded optimizer is DeepSpeed's CPUAdam instead of torch's {name} ({keep})")
    return adam


def _replaceable(optimizer: Optimizer) -> bool:
    return type(optimizer) in {Adam, AdamW} and not any(
        isinstance(group["lr"], torch.Tensor) or any(group.get(name) for name in _UNSUPPORTED)
        for group in optimizer.param_groups
    )


def _say_on_rank_0(line: str) -> None:
    if dist.get_rank() == 0:
        say(line)


class DeepSpeed(Strategy):
    """Wraps a model in DeepSpeed's engine."""

    def check(self, inputs: Inputs) -> None:
        if inputs.tp_plan is not None:
            raise RequestError(
                "tp_plan needs parallel.wrap=ddp or fsdp; with deepspeed, AutoTP shards the model automatically"
            )

    def wrap(self, inputs: Inputs, attention: Attention) -> Wrapped:
        options = deepspeed_config.options(inputs.training.deepspeed)
        named = deepspeed_versions.at(
            options.ds_config, "tensor_parallel.partition_config"
        )  # the user chose the layers
        if inputs.layout.tp > 1 and options.autotp and inputs.mpu is None and not named:
            tied.refuse_for_autotp(inputs.model, inputs.layout.tp)
        repeated.prepare(inputs.model, inputs.blocks, inputs.training, attention.again)
        return _initialize(inputs, attention)


def _initialize(inputs: Inputs, attention: Attention) -> Engine:
    model, layout, device, training = inputs.model, inputs.layout, inputs.device, inputs.training
    make, mpu = inputs.optimizer, inputs.mpu
    timeout = process_group.timeout_of(device) or timedelta(minutes=30)
    starting.start_deepspeed(process_group.backend_on(device.type), timeout, device)
    import deepspeed  # noqa: PLC0415 - takes over a second to import
    from deepspeed.utils import groups  # noqa: PLC0415

    options = deepspeed_config.options(training.deepspeed)
    if not options.gradient_clipping:
        options = replace(options, gradient_clipping=training.gradient_clip)
    if mpu is not None:
        options = replace(options, mpu=True)
    groups.mpu = mpu  # always set: otherwise the mpu of an earlier engine remains
    trains = make is not None or options.optimizer != "none" or "optimizer" in options.ds_config
    build = deepspeed_config.build if trains else deepspeed_config.build_eval
    config, notes = build(options, inputs.batch, layout, training.precision)
    if against := deepspeed_versions.check(config, starting.deepspeed_version()):
        raise RequestError("; ".join(against))  # check again, because the login node may have another DeepSpeed
    config, warned = deepspeed_versions.waiting(config, starting.deepspeed_version(), device.type)
    if dist.get_rank() == 0:
        for note in notes + warned:
            say(note)
    ops.prepare(config, device.type)
    with _autotp_errors_explained(model, layout):
        if (size := deepspeed_versions.tp_to_divide(config, starting.deepspeed_version())) > 1:
            deepspeed.tp_model_init(model, tp_size=size, dtype=torch.bfloat16)  # other types do not work
        parameters = [p for p in model.parameters() if p.requires_grad]
        made = _with_cpu_adam(make(parameters), config, options.ds_config, device) if make else None
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=parameters if trains and made is None else None,
            optimizer=made,
            config=config,
            mpu=mpu,
            dist_init_required=False,
        )
    undo_first_step(engine)
    if deepspeed_versions.at(config, "compile.deepcompile"):
        _deepcompile(engine)
    return Engine(engine, optimizer if trains else None, inputs.batch, attention, _divided_by(inputs.mpu))


def _deepcompile(engine: Any) -> None:
    """Compile the engine with DeepCompile, which needs a GPU. DeepSpeed's key alone does not compile it."""
    from deepspeed.compile import util  # noqa: PLC0415 - as above

    if util.is_deepcompile_supported():
        engine.compile()
    elif dist.get_rank() == 0:
        say("deepspeed.deepcompile has no effect here: DeepCompile needs a GPU")


@contextmanager
def _autotp_errors_explained(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Turn AutoTP's assertion into a RequestError.

    AutoTP finds the layers to divide from the model's class and its repr(). If it finds none, it fails with an
    assertion (supported() and tp_parser() in module_inject/auto_tp.py).
    """
    try:
        yield
    except AssertionError as error:
        if not any(
            "module_inject" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)
        ):
            raise
        raise RequestError(
            f"parallel.tp is {layout.tp} with deepspeed.autotp, but DeepSpeed's AutoTP cannot divide "
            f"{type(model).__name__} ({error}). Use parallel.wrap=fsdp with a tp_plan, use parallel.tp=1, or list the "
            "layers in deepspeed.ds_config (tensor_parallel.partition_config)"
        ) from error


class Engine(Wrapped):
    """A model in DeepSpeed's engine.

    engine: DeepSpeed's engine.
    grad_norm: the norm of the gradients. None with ZeRO 0, in which DeepSpeed does not compute it.
    divided: the number of ranks among which the program itself has divided the model.
    """

    checkpoint_format = wrappers.DEEPSPEED_FORMAT

    def __init__(self, engine: Any, optimizer: Any, batch: Batch, attention: Attention, divided: int) -> None:
        super().__init__(engine.module, optimizer, batch, attention)
        self.engine, self._divided = engine, divided
        self.zero_stage = int(engine.zero_optimization_stage())
        self._summed = _summed(engine)

    def _forward(self, boundary: bool, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss / self._summed)

    def _step(self, complete: bool) -> None:
        self.engine.step()
        if complete:
            norm = self.engine.get_global_grad_norm()
            self.grad_norm = None if norm is None else float(norm)

    def _offload(self, chosen: frozenset[State], named: bool, pin_memory: bool, non_blocking: bool) -> frozenset[State]:
        if setting := off_the_device(self.engine):
            if dist.get_rank() == 0:
                say(f"offload_states() does nothing, because {setting} already keeps states off the device")
            return frozenset()
        check_movable(self.engine, chosen)
        return offload_zero_states(self.engine, chosen, pin_memory, non_blocking)

    def _reload(self, non_blocking: bool) -> None:
        if self.offloaded:
            self.engine.reload_states(non_blocking=non_blocking)

    def check_export(self) -> None:
        if self._divided > 1:
            raise RequestError(
                "export() cannot collect the weights, because the program's mpu divides the model among "
                f"{self._divided} ranks: collect and save them in the program"
            )
        if getattr(self.engine, "_has_autoep_layers", bool)():
            raise RequestError(
                "export() does not support DeepSpeed's AutoEP layers, whose experts are divided among the ranks: "
                "convert a checkpoint of run.save() with python -m deepspeed.checkpoint.ds_to_universal"
            )

    def whole_weights(self, wanted: Collection[int]) -> Iterator[tuple[Tensor, Tensor]]:
        from deepspeed.module_inject.layers import GatherReplacedLayerParams  # noqa: PLC0415 - as above
        from deepspeed.runtime.zero import GatheredParameters  # noqa: PLC0415

        optimizer, divided = self.engine.optimizer, self.engine.autotp_size() > 1
        before, after = (getattr(optimizer, f"checkpoint_event_{name}", None) for name in ("prologue", "epilogue"))
        if before:  # stage 3: also partition small parameters, which stay whole during training
            before()
        for module, tensors in modules_with(self.model, wanted):
            mine = list(module.parameters(recurse=False))
            with GatheredParameters(mine, enabled=self.zero_stage == 3):  # noqa: SIM117 - the second needs the first
                with GatherReplacedLayerParams(mine, module, enabled=divided):
                    for tensor in tensors:
                        yield tensor, tensor.detach()
        if after:
            after()

    def save_files(self, folder: Path, staged: StagedFiles | None = None) -> list[str]:
        from hpcinit.train.checkpoint import deepspeed_checkpoint  # noqa: PLC0415 - takes a second to import, only for a save

        return deepspeed_checkpoint.save(self.engine, folder)

    def load_files(self, path: Path, saved: Description, layout: Layout) -> None:
        from hpcinit.train.checkpoint import deepspeed_checkpoint  # noqa: PLC0415 - as above

        deepspeed_checkpoint.load(self.engine, path, saved, layout.tp)


def _divided_by(mpu: Any) -> int:
    """Return the number of ranks among which the program's mpu divides the model, or 1 without an mpu."""
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        if mpu is not None and hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 1


def _summed(engine: Any) -> int:
    """Return over how many ranks DeepSpeed (0.18.5 and 0.19.8) sums gradients instead of averaging them.

    In stages 0 to 2, these are the ranks that share a sequence (stage_1_and_2.py: world size / sequence_parallel_size).
    In stage 3, DeepSpeed averages over all ranks (reduce_scatter_coalesced), so the result is 1. Raise RequestError for
    stage 3 with reduce_scatter=false, where the scale depends on a parameter's size.
    """
    size: int = engine.sequence_parallel_size
    if engine.zero_optimization_stage() < 3 or size == 1:
        return size
    if not engine.zero_reduce_scatter():
        raise RequestError(
            "ZeRO 3 with parallel.cp > 1 needs zero_optimization.reduce_scatter=true: without it, DeepSpeed would "
            "scale the gradients of small and large parameters differently. The optimizer Muon turns "
            "reduce_scatter off, so use another optimizer"
        )
    return 1
