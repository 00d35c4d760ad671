"""Declares the keys below `deepspeed.`. The login node checks them, and the job reads them from its spec."""

# This file avoids `from __future__ import annotations` and `X | None`, for the reason in config/schema.py.
# ruff: noqa: RUF009, UP045

from dataclasses import dataclass
from typing import Any, Optional

from hpcinit.base.config_key import key

OFFLOAD = ("none", "cpu", "nvme")
# none: the program passes its own torch optimizer. adamw: DeepSpeed's FusedAdam on a GPU, or CPUAdam with offload. Both
# must be compiled. torch_adamw: DeepSpeed creates torch's AdamW, which needs no compilation.
OPTIMIZERS = ("none", "adamw", "torch_adamw", "muon")


@dataclass
class DeepSpeed:
    """The options of parallel.wrap=deepspeed, from which hpcinit builds the ds_config."""

    zero_stage: int = key("ZeRO stage, 0 to 3", 0)
    offload_param: str = key("offload parameters to cpu or nvme, or none; stage 3 only", "none", choices=OFFLOAD)
    offload_optimizer: str = key(
        "offload optimizer states to cpu or nvme, or none; stages 1 to 3", "none", choices=OFFLOAD
    )
    nvme_path: str = key("folder on the node's disk for offload to nvme", "")
    hpz: int = key("ranks in ZeRO++'s secondary partition of the parameters (hpZ); 1: none", 1)
    overlap_comm: Optional[bool] = key("reduce gradients during the backward pass; null: DeepSpeed's default")
    gradient_clipping: float = key("maximum norm of the gradients; 0: no clipping", "${gradient_clip}")
    autotp: bool = key("DeepSpeed splits the model over parallel.tp ranks", True)
    mpu: bool = key("the program passes an mpu object with its process groups to DeepSpeed", False)
    deepcompile: bool = key("use DeepCompile; stages 1 to 3", False)
    universal_checkpoint: bool = key(
        "engine.load_checkpoint reads universal checkpoints; run.load detects them automatically", False
    )
    optimizer: str = key(
        "none (the program creates it), adamw, torch_adamw (nothing is compiled) or muon", "none", choices=OPTIMIZERS
    )
    optimizer_params: dict[str, Any] = key("arguments of the optimizer, as in {lr: 1e-4}", {})
    ds_config: dict[str, Any] = key("DeepSpeed's own keys; they override everything above", {})
