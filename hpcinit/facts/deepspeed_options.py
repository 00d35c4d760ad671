"""What the user may choose under `deepspeed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hpcinit.facts.errors import RequestError

OFFLOAD = ("none", "cpu", "nvme")
# none: the program gives its own torch optimizer. adamw: DeepSpeed's, fused on a GPU and CPUAdam with offload; both are
# compiled. torch_adamw: torch's, by DeepSpeed, nothing is compiled.
OPTIMIZERS = ("none", "adamw", "torch_adamw", "muon")


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
