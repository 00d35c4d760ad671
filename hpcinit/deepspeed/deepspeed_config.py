"""A ds_config from typed options, with the user's own ds_config over it.

Only keys that DeepSpeed 0.18.5 and 0.19.8 both read are set, and an option that DeepSpeed would not heed, as hpZ
outside stage 3, is refused here rather than dropped there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from hpcinit.base.errors import RequestError
from hpcinit.deepspeed.deepspeed_versions import at, stage, unread
from hpcinit.records.batch import Batch, solve
from hpcinit.records.layout import Layout

PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOAD = ("none", "cpu", "nvme")
# none: the program gives its own torch optimizer. adamw: DeepSpeed's, fused on a GPU and CPUAdam with offload; both are
# compiled. torch_adamw: torch's, by DeepSpeed, nothing is compiled.
OPTIMIZERS = ("none", "adamw", "torch_adamw", "muon")
TRIPLE = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
# A choice and its parameters: with another choice, ours are of no use.
TYPED = ("optimizer", "scheduler")
TRAINING = ("optimizer", "scheduler", "compile", "gradient_clipping", "checkpoint")
# Where "auto" means something to DeepSpeed itself. Anywhere else it is Hugging Face's word, and DeepSpeed fails on it.
AUTO = ("data_types.keep_in_fp32_modules", "pipeline.stages")


@dataclass(frozen=True)
class Options:
    """What the user may choose under `deepspeed`. Raises RequestError for what DeepSpeed would refuse or not heed.

    hpz: ranks of the second, smaller partition of the parameters (ZeRO++), 1 without. overlap_comm: None leaves it to
    DeepSpeed. gradient_clipping: the norm, 0 for none. autotp: DeepSpeed splits the model over the layout's tp.
    mpu: the program hands DeepSpeed an `mpu` that knows the groups. ds_config: of the user's own hand, and it wins.
    """

    zero_stage: int = 0
    offload_param: str = "none"
    offload_optimizer: str = "none"
    nvme_path: str = ""
    hpz: int = 1
    overlap_comm: bool | None = None
    gradient_clipping: float = 0.0
    autotp: bool = True
    mpu: bool = False
    deepcompile: bool = False
    universal_checkpoint: bool = False
    optimizer: str = "none"
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    ds_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("zero_stage", self.zero_stage, (0, 1, 2, 3))
        _one_of("offload_param", self.offload_param, OFFLOAD)
        _one_of("offload_optimizer", self.offload_optimizer, OFFLOAD)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.hpz < 1:
            raise RequestError(f"deepspeed.hpz is {self.hpz}, expected 1 (none) or more ranks")
        if self.gradient_clipping < 0:
            raise RequestError(f"deepspeed.gradient_clipping is {self.gradient_clipping}, expected 0 (none) or more")
        for problem in _unheeded(self):
            raise RequestError(problem)


def options(given: Mapping[str, Any]) -> Options:
    """Options from plain values, such as a spec holds. Raises RequestError for a name that is none."""
    known = [each.name for each in fields(Options)]
    for name in given:
        if name not in known:
            raise RequestError(f"deepspeed.{name} is no option, expected one of: {', '.join(known)}")
    return Options(**given)


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise RequestError(f"deepspeed.{name} is {value!r}, expected one of: {', '.join(map(str, choices))}")


def _unheeded(chosen: Options) -> list[str]:
    """Options that DeepSpeed would silently not heed, or refuse in the job."""
    stage = chosen.zero_stage
    rules = (
        (chosen.offload_param != "none" and stage < 3, "offload_param", "does so in stage 3 only"),
        (chosen.offload_optimizer != "none" and stage < 1, "offload_optimizer", "does so from stage 1 on"),
        (
            chosen.offload_optimizer == "nvme" and stage in {1, 2},
            "offload_optimizer",
            "would use the CPU below stage 3",
        ),
        (chosen.hpz > 1 and stage < 3, "hpz", "does so in stage 3 only"),
        (chosen.overlap_comm is not None and stage < 1, "overlap_comm", "does so from stage 1 on"),
    )
    found = [
        f"deepspeed.{name} is {getattr(chosen, name)} with deepspeed.zero_stage {stage}, and DeepSpeed {what}"
        for wrong, name, what in rules
        if wrong
    ]
    nvme = [name for name in ("offload_param", "offload_optimizer") if getattr(chosen, name) == "nvme"]
    if nvme and not chosen.nvme_path:
        found.append(
            f"deepspeed.{nvme[0]} is nvme, and deepspeed.nvme_path is not set: give a folder on the node's disk"
        )
    if chosen.nvme_path and not nvme:
        found.append(f"deepspeed.nvme_path is {chosen.nvme_path!r}, and nothing is offloaded to nvme")
    if chosen.optimizer_params and chosen.optimizer == "none":
        found.append(
            "deepspeed.optimizer_params are set, and deepspeed.optimizer is none: choose one, or take them out"
        )
    return found


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
    merged, said = _merge(config, chosen.ds_config, counted)
    return _one_total(merged), [*notes, *said, *unread(chosen.ds_config)]


def without_ranks(chosen: Options) -> dict[str, Any]:
    """What of build() depends on neither ranks nor batch nor precision: enough to know what it compiles."""
    theirs = {name: value for name, value in chosen.ds_config.items() if name not in TRIPLE}
    return _merge(_alone(chosen), theirs, 1)[0]


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
    merged, said = _merge(config, _without_training(chosen.ds_config), counted)
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
    # apart, so run.wrap hands it an mpu (runtime/wrap/deepspeed_engine.py).
    return {}


def _merge(ours: Mapping[str, Any], theirs: Mapping[str, Any], counted: int) -> tuple[dict[str, Any], list[str]]:
    """`theirs` over `ours`, nested, and a note for each key that both set and differently.

    None in theirs takes a key out. counted: ranks that DeepSpeed takes for data parallel ones, for the three numbers of
    the batch, which are made to agree. Raises RequestError where they cannot.
    """
    notes: list[str] = []
    given = _without_auto(theirs, "", notes)
    merged = _over(ours, given, "", notes)
    _one_precision(merged, given, notes)
    _agree(merged, given, counted)
    return merged, notes


def _without_training(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What of a user's ds_config is also about a model that is not trained."""
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
            notes.append(f"ds_config.{path}: {value!r}, by your hand, and not {have!r} as the options say")
    return merged


def _another(path: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    types = (str(each.get("type", "")).lower() for each in (ours, theirs))
    return path in TYPED and "type" in theirs and len(set(types)) > 1


def _without_auto(theirs: Mapping[str, Any], at: str, notes: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in theirs.items():
        path = f"{at}{name}"
        if value == "auto" and path not in AUTO:
            notes.append(f"ds_config.{path}: 'auto' is Hugging Face's word, which DeepSpeed does not know; left out")
        else:
            kept[name] = _without_auto(value, f"{path}.", notes) if isinstance(value, Mapping) else value
    return kept


def _one_precision(merged: dict[str, Any], theirs: Mapping[str, Any], notes: list[str]) -> None:
    """fp16 of the user's beside our bf16, or the reverse, is theirs alone: DeepSpeed takes one."""
    for name, other in (("fp16", "bf16"), ("bf16", "fp16")):
        wanted = theirs.get(name)
        if isinstance(wanted, Mapping) and wanted.get("enabled") and other in merged and other not in theirs:
            notes.append(f"ds_config.{name}.enabled: True, by your hand, and not {other} as the options say")
            del merged[other]


def _agree(merged: dict[str, Any], theirs: Mapping[str, Any], counted: int) -> None:
    """The three numbers of the batch: what the user set stands, and the rest follows from it without rounding."""
    said = {name: theirs[name] for name in TRIPLE if theirs.get(name) is not None}
    if not said:
        return
    for name, value in said.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise RequestError(f"ds_config.{name} is {value!r}, expected a whole number")
    micro, accumulation, total = (said.get(name) for name in TRIPLE)
    if total is None:
        micro, accumulation = (said.get(name, merged[name]) for name in TRIPLE[:2])
    elif micro is None and accumulation is None:
        micro = merged[TRIPLE[0]]
    try:
        batch = solve(micro, accumulation, total, counted)
    except RequestError as error:
        raise RequestError(f"ds_config.{', '.join(said)}: {error}") from None
    merged.update(zip(TRIPLE, (batch.micro, batch.accumulation, batch.total), strict=True))
