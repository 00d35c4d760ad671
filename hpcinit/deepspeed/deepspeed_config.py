"""Builds a ds_config from hpcinit's options, and merges the user's own ds_config over it.

The result has only keys that both DeepSpeed 0.18.5 and 0.19.8 read. An option that DeepSpeed would ignore, such as hpZ
outside stage 3, is an error here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from hpcinit.base.errors import RequestError
from hpcinit.deepspeed.deepspeed_keys import OFFLOAD, OPTIMIZERS, DeepSpeed
from hpcinit.deepspeed.deepspeed_versions import at, stage, unread
from hpcinit.records.batch import Batch, solve
from hpcinit.records.layout import Layout

PRECISIONS = ("fp32", "bf16", "fp16")
TRIPLE = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
# Sections with a type and its parameters. If the user sets another type, hpcinit's parameters do not apply.
TYPED = ("optimizer", "scheduler")
TRAINING = ("optimizer", "scheduler", "compile", "gradient_clipping", "checkpoint")
# Keys for which DeepSpeed itself accepts "auto". For other keys, it fails: only Hugging Face replaces "auto" there.
AUTO = ("data_types.keep_in_fp32_modules", "pipeline.stages")


@dataclass
class Options(DeepSpeed):
    """The DeepSpeed options of a job.

    Creating them raises RequestError for options that DeepSpeed would refuse or ignore.
    """

    gradient_clipping: float = 0.0

    def __post_init__(self) -> None:
        _one_of("zero_stage", self.zero_stage, (0, 1, 2, 3))
        _one_of("offload_param", self.offload_param, OFFLOAD)
        _one_of("offload_optimizer", self.offload_optimizer, OFFLOAD)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.hpz < 1:
            raise RequestError(f"deepspeed.hpz is {self.hpz}, expected 1 (off) or more")
        if self.gradient_clipping < 0:
            raise RequestError(f"deepspeed.gradient_clipping is {self.gradient_clipping}, expected 0 (none) or more")
        for problem in _ignored(self):
            raise RequestError(problem)


def options(given: Mapping[str, Any]) -> Options:
    """Return Options for the values in a spec. Raise RequestError if a name is unknown."""
    known = [each.name for each in fields(Options)]
    for name in given:
        if name not in known:
            raise RequestError(f"deepspeed.{name}: no such option, expected one of: {', '.join(known)}")
    return Options(**given)


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise RequestError(f"deepspeed.{name} is {value!r}, expected one of: {', '.join(map(str, choices))}")


def _ignored(chosen: Options) -> list[str]:
    stage = chosen.zero_stage
    rules = (
        (chosen.offload_param != "none" and stage < 3, "offload_param", "supports that only in stage 3"),
        (chosen.offload_optimizer != "none" and stage < 1, "offload_optimizer", "supports that only in stages 1 to 3"),
        (
            chosen.offload_optimizer == "nvme" and stage in {1, 2},
            "offload_optimizer",
            "would offload to cpu instead (nvme needs stage 3)",
        ),
        (chosen.hpz > 1 and stage < 3, "hpz", "supports that only in stage 3"),
        (chosen.overlap_comm is not None and stage < 1, "overlap_comm", "supports that only in stages 1 to 3"),
    )
    found = [
        f"deepspeed.{name} is {getattr(chosen, name)} with deepspeed.zero_stage {stage}, but DeepSpeed {what}"
        for wrong, name, what in rules
        if wrong
    ]
    nvme = [name for name in ("offload_param", "offload_optimizer") if getattr(chosen, name) == "nvme"]
    if nvme and not chosen.nvme_path:
        found.append(
            f"deepspeed.{nvme[0]} is nvme, but deepspeed.nvme_path is not set: set it to a folder on the node's disk"
        )
    if chosen.nvme_path and not nvme:
        found.append(
            f"deepspeed.nvme_path is {chosen.nvme_path!r}, but nothing is offloaded to nvme: remove this key, or set "
            "deepspeed.offload_optimizer=nvme"
        )
    if chosen.optimizer_params and chosen.optimizer == "none":
        found.append(
            "deepspeed.optimizer_params is set, but deepspeed.optimizer is none: choose an optimizer, or remove the "
            "parameters"
        )
    return found


class Precision(Protocol):
    """The number formats of a training run.

    param: the format of the model's parameters.
    reduce: the format of gradients while they are summed.
    """

    @property
    def param(self) -> str: ...
    @property
    def reduce(self) -> str: ...


def build(chosen: Options, batch: Batch, layout: Layout, precision: Precision) -> tuple[dict[str, Any], list[str]]:
    """Return the ds_config for training, and notes about the user's keys in it.

    A note reports a key that overrides an option or that DeepSpeed ignores.

    layout: the layout of the ranks. All degrees must be numbers of ranks, not -1.

    Raise RequestError if deepspeed.hpz is not a divisor of the number of ranks, or if the user's batch sizes contradict
    this number.
    """
    counted, notes = _counted(chosen, batch, layout)
    ranks = batch.data_parallel * layout.cp * layout.tp
    if ranks % chosen.hpz:  # DeepSpeed would round the number of groups down and put the last ranks into no group
        raise RequestError(f"deepspeed.hpz is {chosen.hpz}, expected a divisor of {ranks}, the number of ranks")
    config = {
        **_triple(batch, counted),
        **_precision(precision),
        **_parallel(chosen, layout),
        **_without_layout(chosen),
    }
    merged, overridden = _merge(config, chosen.ds_config, counted)
    return _one_total(merged), [*notes, *overridden, *unread(chosen.ds_config)]


def without_ranks(chosen: Options) -> dict[str, Any]:
    """Return the part of build()'s ds_config that does not depend on ranks, batch or precision.

    This part is enough to find out which ops must be compiled.
    """
    theirs = {name: value for name, value in chosen.ds_config.items() if name not in TRIPLE}
    return _merge(_without_layout(chosen), theirs, 1)[0]


def _without_layout(chosen: Options) -> dict[str, Any]:
    found = {
        "zero_optimization": _zero(chosen),
        "gradient_clipping": chosen.gradient_clipping,  # always set, because the default is 0 before 0.19.3 and 1 since
        **_optimizer(chosen),
    }
    if chosen.deepcompile:
        found["compile"] = {"deepcompile": True}
    if chosen.universal_checkpoint:
        found["checkpoint"] = {"load_universal": True}
    return found


def build_eval(chosen: Options, batch: Batch, layout: Layout, precision: Precision) -> tuple[dict[str, Any], list[str]]:
    """Return the ds_config of a model that is not trained, such as a reference model, and notes about the user's keys.

    Without an optimizer, ZeRO stages 1 and 2 fail, so the stage is 3 or 0. Clipping, DeepCompile, accumulation and the
    user's keys for the optimizer are omitted.
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
    merged, overridden = _merge(config, _without_training(chosen.ds_config), counted)
    return _one_total(merged), notes + overridden


def _one_total(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config`, but remove train_batch_size if AutoTP is used in stage 3.

    In this case, DeepSpeed 0.19.8 checks train_batch_size twice. The engine counts the tensor parallel ranks as data
    parallel, but zero.Init does not, so no value passes both checks. Without the key, DeepSpeed computes the value.
    """
    if stage(config) == 3 and int(at(config, "tensor_parallel.autotp_size") or 1) > 1:
        config.pop("train_batch_size", None)
    return config


def _counted(chosen: Options, batch: Batch, layout: Layout) -> tuple[int, list[str]]:
    """Return how many ranks DeepSpeed counts as data parallel, and a note if that is not the real number.

    DeepSpeed's runtime/config.py uses the world size, or what the program's mpu returns. The world size also includes
    the ranks of AutoTP and of context parallelism.
    """
    if chosen.mpu or layout.tp == layout.cp == 1:
        return batch.data_parallel, []
    if layout.tp > 1 and not chosen.autotp:
        raise RequestError(
            f"parallel.tp is {layout.tp}, but deepspeed.autotp is false, so DeepSpeed would average gradients over "
            "tensor parallel ranks. Set deepspeed.autotp=true, or set deepspeed.mpu=true and pass your mpu to run.wrap"
        )
    counted = batch.data_parallel * layout.tp * layout.cp
    which = [("AutoTP's", "tp", layout.tp), ("context parallel", "cp", layout.cp)]
    who = " and ".join(what for what, _, degree in which if degree > 1)
    product = "".join(f" x {name} {degree}" for _, name, degree in which if degree > 1)
    return counted, [
        f"DeepSpeed counts {who} ranks as data parallel ranks: train_batch_size "
        f"{batch.micro * batch.accumulation * counted} = global batch {batch.total}{product}"
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
            False  # Muon needs unsharded gradients: DeepSpeed raises an error with stage 3 and offload (#7919)
        )
    return found | _partition(chosen)


def _partition(chosen: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if chosen.offload_param != "none":
        found["offload_param"] = _device(chosen.offload_param, chosen.nvme_path)
    if chosen.hpz > 1:
        found["zero_hpz_partition_size"] = chosen.hpz
    return found


def _device(device: str, nvme_path: str) -> dict[str, Any]:
    # Set explicitly, because the default is false in 0.18.5 and true in 0.19.8.
    return {"device": device, "pin_memory": True} | ({"nvme_path": nvme_path} if device == "nvme" else {})


def _optimizer(chosen: Options) -> dict[str, Any]:
    params = dict(chosen.optimizer_params)
    if chosen.optimizer == "none":
        # By default, DeepSpeed refuses all optimizers except Adam. With offload, it refuses all except its own.
        return {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if chosen.optimizer == "muon":
        return {"optimizer": {"type": "Muon", "params": params}}
    torch_adam = {"torch_adam": True} if chosen.optimizer == "torch_adamw" else {}
    return {"optimizer": {"type": "AdamW", "params": params | torch_adam}}


def _parallel(chosen: Options, layout: Layout) -> dict[str, Any]:
    if layout.tp > 1 and chosen.autotp and not chosen.mpu:
        return {"tensor_parallel": {"autotp_size": layout.tp}}
    # No key for context parallelism: with sequence_parallel_size, the model's copies diverge in DeepSpeed 0.19.8.
    return {}


def _merge(ours: Mapping[str, Any], theirs: Mapping[str, Any], counted: int) -> tuple[dict[str, Any], list[str]]:
    """Return the user's config `theirs` merged over `ours`, and a note for each key that both set to different values.

    None in `theirs` removes a key. The three batch numbers are made consistent with `counted`, the number of ranks that
    DeepSpeed counts as data parallel. Raise RequestError if that is impossible.
    """
    notes: list[str] = []
    given = _without_auto(theirs, "", notes)
    merged = _over(ours, given, "", notes)
    _one_precision(merged, given, notes)
    _agree(merged, given, counted)
    return merged, notes


def _without_training(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the user's ds_config that also applies to a model that is not trained."""
    kept = {name: value for name, value in theirs.items() if name not in (*TRAINING, *TRIPLE)}
    zero = kept.get("zero_optimization")
    if isinstance(zero, Mapping):
        kept["zero_optimization"] = {
            name: value
            for name, value in zero.items()
            if name != "offload_optimizer" and not (name == "stage" and value in {1, 2})
        }
    return kept


def _over(ours: Mapping[str, Any], theirs: Mapping[str, Any], at: str, notes: list[str]) -> dict[str, Any]:
    merged = dict(ours)
    for name, value in theirs.items():
        path = f"{at}{name}"
        have = merged.get(name)
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(have, Mapping) and not _another(path, have, value):
            merged[name] = _over(have, value, f"{path}.", notes)
            continue
        else:
            merged[name] = value
        if name in ours and have != value:
            notes.append(f"ds_config.{path}: your value {value!r} overrides {have!r} from the deepspeed options")
    return merged


def _another(path: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    types = (str(each.get("type", "")).lower() for each in (ours, theirs))
    return path in TYPED and "type" in theirs and len(set(types)) > 1


def _without_auto(theirs: Mapping[str, Any], at: str, notes: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in theirs.items():
        path = f"{at}{name}"
        if value == "auto" and path not in AUTO:
            notes.append(f"skipping ds_config.{path}: its value 'auto' works only with Hugging Face's Trainer")
        else:
            kept[name] = _without_auto(value, f"{path}.", notes) if isinstance(value, Mapping) else value
    return kept


def _one_precision(merged: dict[str, Any], theirs: Mapping[str, Any], notes: list[str]) -> None:
    """Remove hpcinit's bf16 if the user enables fp16, or hpcinit's fp16 if the user enables bf16.

    DeepSpeed accepts only one of them. Add a note to `notes`.
    """
    for name, other in (("fp16", "bf16"), ("bf16", "fp16")):
        wanted = theirs.get(name)
        if isinstance(wanted, Mapping) and wanted.get("enabled") and other in merged and other not in theirs:
            notes.append(f"ds_config.{name}.enabled: your value True overrides {other} from precision.param")
            del merged[other]


def _agree(merged: dict[str, Any], theirs: Mapping[str, Any], counted: int) -> None:
    """Make the three batch numbers consistent.

    The numbers that the user set stay as they are, and the others are computed from them.
    """
    given = {name: theirs[name] for name in TRIPLE if theirs.get(name) is not None}
    if not given:
        return
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise RequestError(f"ds_config.{name} is {value!r}, expected a whole number")
    micro, accumulation, total = (given.get(name) for name in TRIPLE)
    if total is None:
        micro, accumulation = (given.get(name, merged[name]) for name in TRIPLE[:2])
    elif micro is None and accumulation is None:
        micro = merged[TRIPLE[0]]
    try:
        batch = solve(micro, accumulation, total, counted)
    except RequestError as error:
        raise RequestError(f"ds_config.{', '.join(given)}: {error}") from None
    merged.update(zip(TRIPLE, (batch.micro, batch.accumulation, batch.total), strict=True))
