"""A ds_config from typed options.

Only keys that DeepSpeed 0.18.5 and 0.19.8 both read are set, and an option that DeepSpeed would not heed, as hpZ
outside stage 3, is refused here rather than dropped there.
"""

from __future__ import annotations

from typing import Any, Protocol

from hpcinit.facts import deepspeed_keys, deepspeed_merge
from hpcinit.facts.batch import Batch
from hpcinit.facts.deepspeed_options import Options, options
from hpcinit.facts.deepspeed_versions import at, stage
from hpcinit.facts.errors import RequestError
from hpcinit.facts.layout import Layout

__all__ = ["Options", "build", "build_eval", "options", "without_ranks"]

PRECISIONS = ("fp32", "bf16", "fp16")


class Precision(Protocol):
    """param: what the model is trained in. reduce: what gradients are summed in."""

    @property
    def param(self) -> str: ...
    @property
    def reduce(self) -> str: ...


def build(chosen: Options, batch: Batch, layout: Layout, precision: Precision) -> tuple[dict[str, Any], list[str]]:
    """The ds_config to train with, and notes: one line for each key of the user's own that contradicts ours or that
    DeepSpeed does not know.

    layout: without a -1. Raises RequestError.
    """
    counted, notes = _counted(chosen, batch, layout)
    ranks = batch.data_parallel * layout.cp * layout.tp
    if ranks % chosen.hpz:  # DeepSpeed floors the number of groups, and the last ranks would be in none
        raise RequestError(f"deepspeed.hpz is {chosen.hpz}, expected a divisor of the {ranks} ranks")
    config = {**_triple(batch, counted), **_precision(precision), **_parallel(chosen, layout), **_alone(chosen)}
    merged, said = deepspeed_merge.merge(config, chosen.ds_config, counted)
    return _one_total(merged), [*notes, *said, *deepspeed_keys.unread(chosen.ds_config)]


def without_ranks(chosen: Options) -> dict[str, Any]:
    """What of build() depends on neither ranks nor batch nor precision: enough to know what it compiles."""
    theirs = {name: value for name, value in chosen.ds_config.items() if name not in deepspeed_merge.TRIPLE}
    return deepspeed_merge.merge(_alone(chosen), theirs, 1)[0]


def _alone(chosen: Options) -> dict[str, Any]:
    found = {
        "zero_optimization": _zero(chosen),
        "gradient_clipping": chosen.gradient_clipping,  # always: the default was 0, and is 1 since 0.19.3
        **_optimizer(chosen),
    }
    if chosen.deepcompile:
        found["compile"] = {"deepcompile": True}
    if chosen.universal_checkpoint:
        found["checkpoint"] = {"load_universal": True}
    return found


def build_eval(chosen: Options, batch: Batch, layout: Layout, precision: Precision) -> tuple[dict[str, Any], list[str]]:
    """The ds_config of a model that is not trained, such as a reference model beside the trained one.

    Of ZeRO only stage 3 does anything without an optimizer, and 1 and 2 refuse to be without; no clipping, no
    DeepCompile, no accumulation. Of the user's own ds_config, what is about the optimizer is left out.
    """
    alone = Batch(batch.micro, 1, batch.data_parallel)
    counted, notes = _counted(chosen, alone, layout)
    stage3 = chosen.zero_stage == 3
    zero: dict[str, Any] = {"stage": 3 if stage3 else 0}
    if stage3:
        zero |= _partition(chosen)
    config = {
        **_triple(alone, counted),
        **_precision(precision),
        "zero_optimization": zero,
        **_parallel(chosen, layout),
    }
    merged, said = deepspeed_merge.merge(config, deepspeed_merge.without_training(chosen.ds_config), counted)
    return _one_total(merged), notes + said


def _one_total(config: dict[str, Any]) -> dict[str, Any]:
    """Without train_batch_size for AutoTP in stage 3, where DeepSpeed 0.19.8 reads the config twice.

    The engine counts tensor parallel ranks, zero.Init with AutoTP's mpu does not, and each checks the product: no total
    does for both. From the two other numbers each makes its own.
    """
    if stage(config) == 3 and int(at(config, "tensor_parallel.autotp_size") or 1) > 1:
        config.pop("train_batch_size", None)
    return config


def _counted(chosen: Options, batch: Batch, layout: Layout) -> tuple[int, list[str]]:
    """How many ranks DeepSpeed takes for data parallel ones, and a line where that is not what they are.

    runtime/config.py: the world; with an mpu (as run.wrap's for context parallelism) what it says. Nothing takes
    AutoTP's ranks out.
    """
    if layout.tp == 1 or chosen.mpu:
        return batch.data_parallel, []
    if not chosen.autotp:
        raise RequestError(
            f"parallel.tp is {layout.tp} with deepspeed.autotp false: DeepSpeed would average gradients over tensor "
            "parallel ranks; set deepspeed.autotp=true, or deepspeed.mpu=true and give run.wrap your mpu"
        )
    if layout.cp > 1:
        raise RequestError(
            f"parallel.tp {layout.tp} x parallel.cp {layout.cp}: DeepSpeed's AutoTP takes all other ranks for data "
            "parallel ones; use one of the two, or parallel.wrap=fsdp"
        )
    counted = batch.data_parallel * layout.tp
    return counted, [
        "DeepSpeed counts AutoTP's ranks as data parallel ones: train_batch_size "
        f"{batch.micro * batch.accumulation * counted} = global batch {batch.total} x tp {layout.tp}"
    ]


def _triple(batch: Batch, counted: int) -> dict[str, Any]:
    return {
        "train_batch_size": batch.micro * batch.accumulation * counted,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }


def _precision(precision: Precision) -> dict[str, Any]:
    if precision.param not in PRECISIONS:
        raise RequestError(f"precision.param is {precision.param!r}, expected one of: {', '.join(PRECISIONS)}")
    found: dict[str, Any] = {} if precision.param == "fp32" else {precision.param: {"enabled": True}}
    if precision.reduce != precision.param:
        found["communication_data_type"] = precision.reduce
    return found


def _zero(chosen: Options) -> dict[str, Any]:
    found: dict[str, Any] = {"stage": chosen.zero_stage}
    if chosen.offload_optimizer != "none":
        found["offload_optimizer"] = _device(chosen.offload_optimizer, chosen.nvme_path)
    if chosen.overlap_comm is not None:
        found["overlap_comm"] = chosen.overlap_comm
    if chosen.optimizer == "muon":
        found["reduce_scatter"] = (
            False  # Muon needs whole gradients: stage 3 and offload raise with it (DeepSpeed#7919)
        )
    return found | _partition(chosen)


def _partition(chosen: Options) -> dict[str, Any]:
    """Of the parameters, in stage 3."""
    found: dict[str, Any] = {}
    if chosen.offload_param != "none":
        found["offload_param"] = _device(chosen.offload_param, chosen.nvme_path)
    if chosen.hpz > 1:
        found["zero_hpz_partition_size"] = chosen.hpz
    return found


def _device(device: str, nvme_path: str) -> dict[str, Any]:
    # Pinned in both: the default was false in 0.18.5 and is true in 0.19.8.
    return {"device": device, "pin_memory": True} | ({"nvme_path": nvme_path} if device == "nvme" else {})


def _optimizer(chosen: Options) -> dict[str, Any]:
    params = dict(chosen.optimizer_params)
    if chosen.optimizer == "none":
        # Or DeepSpeed refuses one that is not Adam, and with offload any that is not its own.
        return {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if chosen.optimizer == "muon":
        return {"optimizer": {"type": "Muon", "params": params}}
    torch_adam = {"torch_adam": True} if chosen.optimizer == "torch_adamw" else {}
    return {"optimizer": {"type": "AdamW", "params": params | torch_adam}}


def _parallel(chosen: Options, layout: Layout) -> dict[str, Any]:
    if layout.tp > 1 and chosen.autotp and not chosen.mpu:
        return {"tensor_parallel": {"autotp_size": layout.tp}}
    # Nothing for context parallelism: with sequence_parallel_size DeepSpeed 0.19.8 lets the copies of the model drift
    # apart, so run.wrap hands it an mpu (runtime/wrap/deepspeed.py).
    return {}
