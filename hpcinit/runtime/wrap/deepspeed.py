"""DeepSpeed's engine."""

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

from hpcinit.facts import deepspeed_config, deepspeed_versions, wrappers
from hpcinit.facts.batch import Batch
from hpcinit.facts.errors import RequestError
from hpcinit.facts.layout import Layout
from hpcinit.facts.saying import say
from hpcinit.runtime import deepspeed as starting
from hpcinit.runtime import ops, process_group
from hpcinit.runtime.wrap import blocks as repeated
from hpcinit.runtime.wrap import first_step, zero_states
from hpcinit.runtime.wrap.sequence import Attention
from hpcinit.runtime.wrap.states import State
from hpcinit.runtime.wrap.strategy import Inputs, Strategy
from hpcinit.runtime.wrap.wrapped import Wrapped

if TYPE_CHECKING:
    from hpcinit.runtime.checkpoint.folder import Description


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
    starting.start(dist.get_backend(), timeout, device)
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
    if against := deepspeed_versions.check(config, starting.version(), torch.__version__):
        raise RequestError("; ".join(against))  # the login node may have seen another DeepSpeed, or none
    config, warned = deepspeed_versions.waiting(config, starting.version(), device.type)
    if dist.get_rank() == 0:
        for note in notes + warned:
            say(note)
    ops.prepare(config, device.type)
    with _autotp_in_words(model, layout):
        if (size := deepspeed_versions.tp_to_divide(config, starting.version())) > 1:
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
    first_step.undo(engine)
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
        zero_states.check(self.engine, starting.version(), chosen if named else frozenset())
        return zero_states.offload(self.engine, chosen, pin_memory, non_blocking)

    def _reload(self, non_blocking: bool) -> None:
        if self.offloaded:
            self.engine.reload_states(non_blocking=non_blocking)

    def save_files(self, folder: Path) -> list[str]:
        from hpcinit.runtime.checkpoint import deepspeed  # noqa: PLC0415 - a second to import, for those who save

        return deepspeed.save(self.engine, folder)

    def load_files(self, path: Path, saved: Description, layout: Layout) -> None:
        from hpcinit.runtime.checkpoint import deepspeed  # noqa: PLC0415 - as above

        deepspeed.load(self.engine, path, saved, layout.tp)


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
