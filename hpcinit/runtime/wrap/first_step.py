"""ZeRO 0 in 16 bits makes a step before the first one, so that all memory is taken at the start."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def undo(engine: Any) -> None:
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
