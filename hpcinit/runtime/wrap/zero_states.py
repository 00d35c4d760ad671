"""What DeepSpeed moves of an engine's states, and why it would not: it says so by assertions, or not at all."""

from __future__ import annotations

from typing import Any

from hpcinit.facts import deepspeed_versions
from hpcinit.facts.errors import RequestError
from hpcinit.runtime.wrap.states import State

_OF_OPTIMIZER: frozenset[State] = frozenset({"optim_states", "hp_params"})


def check(engine: Any, version: str, named: frozenset[State]) -> None:
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


def offload(engine: Any, chosen: frozenset[State], pin_memory: bool, non_blocking: bool) -> frozenset[State]:
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
