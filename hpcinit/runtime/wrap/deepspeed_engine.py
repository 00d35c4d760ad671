"""A model in DeepSpeed's engine: its first step, its states and their offload."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hpcinit.base.console import say
from hpcinit.base.errors import RequestError
from hpcinit.deepspeed import deepspeed_config, deepspeed_versions
from hpcinit.records import wrappers
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.runtime import deepspeed_setup as starting
from hpcinit.runtime import ops, process_group
from hpcinit.runtime.wrap import blocks as repeated
from hpcinit.runtime.wrap.sequence import Attention
from hpcinit.runtime.wrap.states import State
from hpcinit.runtime.wrap.strategy import Inputs, Strategy
from hpcinit.runtime.wrap.wrapped import Wrapped

if TYPE_CHECKING:
    from hpcinit.runtime.checkpoint.checkpoint_folder import Description

# ZeRO 0 in 16 bits makes a step before the first one, so that all memory is taken at the start.


@torch.no_grad()
def undo_first_step(engine: Any) -> None:
    """Leave the engine's optimizer as one that has made no step; nothing to do in other stages and in fp32.

    DeepSpeed (0.18.5 and 0.19.8, runtime/fp16/unfused_optimizer.py and fused_optimizer.py, initialize_optimizer_states)
    has the optimizer step with gradients of zero. Adam then counts from 2: it corrects its averages, empty as they are,
    for a step too many, so that the first steps are a quarter shorter; AdamW's weight decay comes once more. States are
    made at the first step, as in stages 1 to 3.
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


# What DeepSpeed moves of an engine's states, and why it would not: it says so by assertions, or not at all.

_OF_OPTIMIZER: frozenset[State] = frozenset({"optim_states", "hp_params"})


def check_zero_states(engine: Any, version: str, named: frozenset[State]) -> None:
    """named: what the user asked for by name; the rest may stay where it is. Raises RequestError."""
    stage = int(engine.zero_optimization_stage())
    if not deepspeed_versions.states_can_move(stage, version):
        needed = deepspeed_versions.STATES_MOVE_SINCE.get(stage)
        way = f"DeepSpeed {version} is installed, it needs {needed} or later" if needed else "stages 1 to 3 can"
        raise RequestError(f"offload_states() with deepspeed.zero_stage {stage}: {way}")
    if _device(engine.zero_offload_param()) != "none":
        raise RequestError(
            "offload_states() with deepspeed.offload_param: DeepSpeed moves no states of parameters that are offloaded "
            "already; deepspeed.offload_param=none, or leave it to that"
        )
    if not hasattr(engine.optimizer, "offload_states"):  # BF16_Optimizer: stage 1 with data_types.grad_accum_dtype
        raise RequestError(
            f"offload_states(): DeepSpeed's {type(engine.optimizer).__name__} cannot; deepspeed.zero_stage=2, or take "
            "data_types out of deepspeed.ds_config"
        )
    if gone := sorted(named & _elsewhere(engine)):
        raise RequestError(
            f"offload_states() has {', '.join(gone)}, which deepspeed.offload_optimizer keeps off the device already: "
            "leave them out, or deepspeed.offload_optimizer=none"
        )
    asked = (named or _OF_OPTIMIZER) & _OF_OPTIMIZER - _elsewhere(engine)  # nothing named is all that is there
    if stage == 3 and asked and not _fused(engine):
        raise RequestError(
            "offload_states() of optim_states and hp_params with deepspeed.zero_stage 3 and "
            f"{type(engine.optimizer.optimizer).__name__}: there DeepSpeed moves its FusedAdam's only; "
            "deepspeed.optimizer=adamw, or name the others: include=['lp_params', 'lp_grads', 'contiguous_grad_buffer']"
        )


def offload_zero_states(
    engine: Any, chosen: frozenset[State], pin_memory: bool, non_blocking: bool
) -> frozenset[State]:
    """What went; a state that this engine has none of stays out."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum  # noqa: PLC0415 - a second to import

    wanted = [OffloadStateTypeEnum(name) for name in sorted(chosen)]
    engine.offload_states(include=wanted, pin_memory=pin_memory, non_blocking=non_blocking)
    return frozenset(name for name in chosen if OffloadStateTypeEnum(name) in engine.optimizer.offloaded_states)


def _elsewhere(engine: Any) -> frozenset[State]:
    """What DeepSpeed leaves out in silence (engine.py, _refine_include_states)."""
    if not engine.zero_use_cpu_optimizer():
        return frozenset()
    return _OF_OPTIMIZER | ({"lp_grads"} if engine.zero_optimization_partition_weights() else set())


def _fused(engine: Any) -> bool:
    from deepspeed.ops.adam import FusedAdam  # noqa: PLC0415 - as above

    return type(engine.optimizer.optimizer) is FusedAdam


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


class DeepSpeed(Strategy):
    """DeepSpeed's engine around the model."""

    def check(self, inputs: Inputs) -> None:
        if inputs.tp_plan is not None:
            raise RequestError(
                "a tp_plan is for parallel.wrap=ddp or fsdp: with deepspeed, AutoTP divides the model by itself"
            )

    def wrap(self, inputs: Inputs, attention: Attention) -> Wrapped:
        repeated.prepare(inputs.model, inputs.blocks, inputs.training, attention.again)
        return _initialize(inputs, attention)


def _initialize(inputs: Inputs, attention: Attention) -> Engine:
    """Return DeepSpeed's engine, and start DeepSpeed if nothing has. Raise RequestError or BringUpError."""
    model, layout, device, training = inputs.model, inputs.layout, inputs.device, inputs.training
    make, mpu = inputs.optimizer, inputs.mpu
    timeout = process_group.timeout_of(device) or timedelta(minutes=30)
    starting.start_deepspeed(dist.get_backend(), timeout, device)
    import deepspeed  # noqa: PLC0415 - over a second to import
    from deepspeed.utils import groups  # noqa: PLC0415

    options = deepspeed_config.options(training.deepspeed)
    if not options.gradient_clipping:
        options = replace(options, gradient_clipping=training.gradient_clip)
    if mpu is None and layout.cp > 1:
        mpu = SequenceGroups(inputs.mesh["cp"].get_group())
    if mpu is not None:
        options = replace(options, mpu=True)
    groups.mpu = mpu  # or those of an engine before it
    trains = make is not None or options.optimizer != "none" or "optimizer" in options.ds_config
    build = deepspeed_config.build if trains else deepspeed_config.build_eval
    config, notes = build(options, inputs.batch, layout, training.precision)
    if against := deepspeed_versions.check(config, starting.deepspeed_version(), torch.__version__):
        raise RequestError("; ".join(against))  # the login node may have seen another DeepSpeed, or none
    config, warned = deepspeed_versions.waiting(config, starting.deepspeed_version(), device.type)
    if dist.get_rank() == 0:
        for note in notes + warned:
            say(note)
    ops.prepare(config, device.type)
    with _autotp_in_words(model, layout):
        if (size := deepspeed_versions.tp_to_divide(config, starting.deepspeed_version())) > 1:
            deepspeed.tp_model_init(model, tp_size=size, dtype=torch.bfloat16)  # it takes no other
        parameters = [p for p in model.parameters() if p.requires_grad]
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=parameters if trains and make is None else None,
            optimizer=make(parameters) if make else None,
            config=config,
            mpu=mpu,
            dist_init_required=False,
        )
    undo_first_step(engine)
    return Engine(engine, optimizer if trains else None, inputs.batch, attention)


@contextmanager
def _autotp_in_words(model: nn.Module, layout: Layout) -> Iterator[None]:
    """AutoTP finds the layers to divide by the model's class and printed form, and ends in an assertion if it cannot.

    module_inject/auto_tp.py, supported() and tp_parser(). Raises RequestError.
    """
    try:
        yield
    except AssertionError as error:
        if not any(
            "module_inject" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)
        ):
            raise
        raise RequestError(
            f"parallel.tp is {layout.tp} with deepspeed.autotp, and DeepSpeed's AutoTP does not know how to divide "
            f"{type(model).__name__} ({error}); parallel.wrap=fsdp and a tp_plan for run.wrap, parallel.tp=1, or name "
            "its layers in deepspeed.ds_config: tensor_parallel.partition_config"
        ) from error


class SequenceGroups:
    """Which ranks share a sequence, as DeepSpeed asks an `mpu` (its own: runtime/sequence_parallel/parallel_state_sp).

    Not by sequence_parallel_size in the ds_config: with it DeepSpeed 0.19.8 averages gradients over the ranks of one
    part of the sequences only, and the copies of the model drift apart.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._all = dist.group.WORLD

    def initialize_sequence_parallel(self, size: int) -> None:
        """By its name DeepSpeed tells that this is not about tensor parallelism."""

    def get_sequence_parallel_group(self) -> ProcessGroup:
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(self._group)

    def get_sequence_data_parallel_group(self) -> ProcessGroup | None:
        return self._all

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._all)

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank(self._all)

    get_model_parallel_group = get_sequence_parallel_group
    get_model_parallel_world_size = get_sequence_parallel_world_size
    get_model_parallel_rank = get_sequence_parallel_rank


class Engine(Wrapped):
    """engine: DeepSpeed's own, for what only it can do. grad_norm is None in ZeRO 0, for which it keeps none."""

    checkpoint_format = wrappers.DEEPSPEED_FORMAT

    def __init__(self, engine: Any, optimizer: Any, batch: Batch, attention: Attention) -> None:
        super().__init__(engine.module, optimizer, batch, attention)
        self.engine = engine
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
        check_zero_states(self.engine, starting.deepspeed_version(), chosen if named else frozenset())
        return offload_zero_states(self.engine, chosen, pin_memory, non_blocking)

    def _reload(self, non_blocking: bool) -> None:
        if self.offloaded:
            self.engine.reload_states(non_blocking=non_blocking)

    def save_files(self, folder: Path) -> list[str]:
        from hpcinit.runtime.checkpoint import deepspeed_checkpoint  # noqa: PLC0415 - a second to import, for those who save

        return deepspeed_checkpoint.save(self.engine, folder)

    def load_files(self, path: Path, saved: Description, layout: Layout) -> None:
        from hpcinit.runtime.checkpoint import deepspeed_checkpoint  # noqa: PLC0415 - as above

        deepspeed_checkpoint.load(self.engine, path, saved, layout.tp)


def _summed(engine: Any) -> int:
    """Over how many ranks of a sequence DeepSpeed sums gradients where it averages them over all others.

    All of them in stages 0 to 2 (stage_1_and_2.py: world size / sequence_parallel_size); none in stage 3, whose
    reduce_scatter_coalesced divides by the world size (the same in 0.18.5 and 0.19.8). Raises RequestError where stage
    3 does the one for some parameters and the other for others.
    """
    size: int = engine.sequence_parallel_size
    if engine.zero_optimization_stage() < 3 or size == 1:
        return size
    if not engine.zero_reduce_scatter():
        raise RequestError(
            "ZeRO 3 with parallel.cp > 1 and zero_optimization.reduce_scatter false: DeepSpeed scales gradients by "
            "the size of a parameter; leave reduce_scatter at true (Muon sets it to false)"
        )
    return 1
