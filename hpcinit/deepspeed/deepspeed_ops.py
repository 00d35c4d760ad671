"""Finds out which of DeepSpeed's ops must be compiled for a ds_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcinit.deepspeed.deepspeed_versions import at

# Maps an op, named like the folder in which torch builds it, to DeepSpeed's builder (op_builder/*.py, NAME).
BUILDERS = {
    "async_io": "AsyncIOBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "dc": "DeepCompileBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
    "fused_lamb": "FusedLambBuilder",
    "fused_lion": "FusedLionBuilder",
    "gds": "GDSBuilder",
    "quantizer": "QuantizerBuilder",
}
# Maps optimizer.type to two ops: for states on the device, and for offloaded states. For other types, DeepSpeed uses
# torch's own optimizer (runtime/engine.py, _configure_basic_optimizer).
_OPTIMIZERS = {
    "adam": ("fused_adam", "cpu_adam"),
    "adamw": ("fused_adam", "cpu_adam"),
    "muon": ("fused_adam", "cpu_adam"),
    "lion": ("fused_lion", "cpu_lion"),
    "adagrad": ("", "cpu_adagrad"),
    "lamb": ("fused_lamb", "fused_lamb"),
}
_OFFLOADED = ("cpu", "nvme")
_ZERO = "zero_optimization."


def needed(config: Mapping[str, Any], device: str) -> tuple[str, ...]:
    """Return the names of the ops that must be compiled, sorted. A torch optimizer needs none.

    config: the ds_config.
    device: torch's device type, 'cuda' or 'cpu'.

    Omit deepspeed_shm_comm, which DeepSpeed compiles on a CPU with any config; see ops.start_uncompiled().
    """
    found = {_of_optimizer(config)}
    offload = [at(config, f"{_ZERO}{name}.device") for name in ("offload_optimizer", "offload_param")]
    if "nvme" in offload:
        found.add("gds" if at(config, "aio.use_gds") else "async_io")
    quantized = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    if any(at(config, f"{_ZERO}{name}") for name in quantized) and device != "cpu":
        found.add("quantizer")
    if at(config, "compile.deepcompile") and device == "cuda":
        found.add("dc")
    return tuple(sorted(found - {""}))


def _of_optimizer(config: Mapping[str, Any]) -> str:
    if at(config, "optimizer.params.torch_adam"):
        return ""
    on_device, offloaded = _OPTIMIZERS.get(str(at(config, "optimizer.type") or "").lower(), ("", ""))
    return offloaded if at(config, f"{_ZERO}offload_optimizer.device") in _OFFLOADED else on_device
