"""What a ds_config needs of the installed DeepSpeed and torch, as data.

Each row was read in DeepSpeed's source: `git tag --contains` of the commit that a link names, or the released packages
0.18.5, 0.19.6, 0.19.7 and 0.19.8 side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcinit.facts.versions import key

_TP = "tensor_parallel.autotp_size"

# ZeRO stage -> the first DeepSpeed whose engine.offload_states() does it: #6011, and #7421 for 1 and 2
STATES_MOVE_SINCE = {1: "0.17.6", 2: "0.17.6", 3: "0.15.2"}

# The first DeepSpeed that in stage 3 waits for all of several gathers, and not for the last alone: #8539. On a GPU the
# order of its stream made that enough; gloo has no order, and what was not there yet was read: memory of anything.
GATHERS_WAIT_SINCE = "0.19.8"
SEQUENTIAL = "stage3_allgather_sequential"  # of zero_optimization, since 0.18.5 (#7661): a way that waits for each

# The first DeepSpeed whose initialize() divides a model for AutoTP; before, it trains one that somebody else has
# divided, and says nothing if nobody has: #7806
INITIALIZE_DIVIDES_SINCE = "0.18.6"

# The first DeepSpeed whose import leaves CUDA alone. Before, ops and the check for Triton asked the device what it is,
# which starts CUDA, and a forked rank cannot start it again: #7252, #7918, #8078
IMPORT_LEAVES_CUDA_SINCE = "0.19.3"


def tp_to_divide(config: Mapping[str, Any], deepspeed: str) -> int:
    """Among how many ranks deepspeed.tp_model_init() has to divide the model before initialize(); 1 is not at all."""
    size = int(at(config, _TP) or 1)
    return size if key(deepspeed) < key(INITIALIZE_DIVIDES_SINCE) else 1


def states_can_move(zero_stage: int, deepspeed: str) -> bool:
    """Whether engine.offload_states() works; never in stage 0."""
    return zero_stage in STATES_MOVE_SINCE and key(deepspeed) >= key(STATES_MOVE_SINCE[zero_stage])


@dataclass(frozen=True)
class Fact:
    """`used` in a ds_config, `path` needs these versions: `since` <= DeepSpeed < `below`, and the same of torch.

    '' is no bound. source: where DeepSpeed says so.
    """

    path: str
    used: Callable[[Mapping[str, Any]], bool]
    do: str
    source: str
    since: str = ""
    below: str = ""
    torch_since: str = ""
    torch_below: str = ""
    # The torch bounds hold for these versions of DeepSpeed only.
    for_since: str = ""
    for_below: str = ""

    def problem(self, config: Mapping[str, Any], deepspeed: str, torch: str) -> str:
        """The message, '' if there is nothing to say."""
        if not self.used(config):
            return ""
        if not _between(deepspeed, self.since, self.below):
            return self._message(config, f"DeepSpeed {deepspeed}", _bounds("DeepSpeed", self.since, self.below))
        if _between(deepspeed, self.for_since, self.for_below) and not _between(
            torch, self.torch_since, self.torch_below
        ):
            needed = _bounds("torch", self.torch_since, self.torch_below)
            return self._message(config, f"torch {torch} with DeepSpeed {deepspeed}", needed)
        return ""

    def _message(self, config: Mapping[str, Any], have: str, needed: str) -> str:
        value = at(config, self.path)
        shown = "" if isinstance(value, Mapping) else f" {value!r}"
        return f"ds_config {self.path}{shown}: {have} is installed, it needs {needed} ({self.source}); {self.do}"


def at(config: Mapping[str, Any], path: str) -> Any:
    """config['a']['b'] for 'a.b'; None where there is no such key."""
    found: Any = config
    for word in path.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return found


def stage(config: Mapping[str, Any]) -> int:
    return int(at(config, "zero_optimization.stage") or 0)


def _autotp(config: Mapping[str, Any]) -> bool:
    return int(at(config, "tensor_parallel.autotp_size") or 0) > 1


def _muon(config: Mapping[str, Any]) -> bool:
    return str(at(config, "optimizer.type") or "").lower() == "muon"


def _deepcompile(config: Mapping[str, Any]) -> bool:
    return bool(at(config, "compile.deepcompile"))


def _between(version: str, since: str, below: str) -> bool:
    return (not since or key(version) >= key(since)) and (not below or key(version) < key(below))


def _bounds(name: str, since: str, below: str) -> str:
    return f"{name} " + " and ".join(
        word for word in (since and f"{since} or later", below and f"below {below}") if word
    )


def _removed(path: str, below: str) -> Fact:
    return Fact(
        path,
        lambda c: at(c, path) is not None,
        "take it out of ds_config",
        f"removed in {below}, DeepSpeed#8489",
        "",
        below,
    )


_DC = "compile.deepcompile"
_MUON = "optimizer.type"
FACTS = (
    Fact(_TP, _autotp, "update DeepSpeed, or set parallel.tp=1", "DeepSpeed#7004", since="0.16.4"),
    Fact(
        _TP,
        lambda c: _autotp(c) and stage(c) == 3,
        "update DeepSpeed, or use ZeRO stage 0 to 2",
        "with ZeRO stage 3, DeepSpeed#8167",
        since="0.19.4",
    ),
    Fact(_MUON, _muon, "update DeepSpeed, or choose another optimizer", "DeepSpeed#7509", since="0.17.6"),
    Fact(
        _MUON,
        lambda c: _muon(c) and stage(c) == 3,
        "update DeepSpeed, or use ZeRO stage 1 or 2",
        "with ZeRO stage 3, DeepSpeed#7919",
        since="0.18.9",
    ),
    *(
        Fact(
            f"optimizer.params.{name}",
            lambda c, name=name: _muon(c) and at(c, f"optimizer.params.{name}") is not None,  # type: ignore[misc]
            "update DeepSpeed, or give lr alone",
            "DeepSpeed#7658",
            since="0.18.3",
        )
        for name in ("muon_lr", "adam_lr")
    ),
    Fact(_DC, _deepcompile, "update DeepSpeed, or turn deepcompile off", "DeepSpeed#7154", since="0.16.6"),
    Fact(
        _DC,
        lambda c: _deepcompile(c) and stage(c) == 2,
        "update DeepSpeed, or use ZeRO stage 1 or 3",
        "with ZeRO stage 2, DeepSpeed#7366",
        since="0.17.2",
    ),
    Fact(_DC, _deepcompile, "update torch, or turn deepcompile off", "deepspeed/compile/util.py", torch_since="2.6"),
    # DeepSpeed asks torch.__version__ <= 2.7, later <= 2.9, and 2.9.0+cu128, as the wheels say, is more than 2.9.
    Fact(
        _DC,
        _deepcompile,
        "update DeepSpeed to 0.19.0, or turn deepcompile off",
        "deepspeed/compile/util.py",
        torch_below="2.7",
        for_below="0.18.4",
    ),
    Fact(
        _DC,
        _deepcompile,
        "update DeepSpeed to 0.19.0, or turn deepcompile off",
        "deepspeed/compile/util.py; DeepSpeed#7755, #7951",
        torch_below="2.9",
        for_since="0.18.4",
        for_below="0.19.0",
    ),
    *(
        _removed(path, "0.19.7")
        for path in (
            "nebula",
            "compression_training",
            "quantize_training",
            "sparse_attention",
            "zero_optimization.mics_shard_size",
            "zero_optimization.mics_hierarchical_params_gather",
        )
    ),
    *(
        _removed(path, "0.19.8")
        for path in (
            "amp",
            "sparse_gradients",
            "eigenvalue",
            "elasticity",
            "graph_harvesting",
            "curriculum_learning",
            "progressive_layer_drop",
            "zero_optimization.zeropp_loco_param",
        )
    ),
)


def check(config: Mapping[str, Any], deepspeed: str, torch: str) -> list[str]:
    """What stands against training with this ds_config: one message each, with the key, what is and what to do.

    deepspeed, torch: their versions, as installed() gives them. Raises ValueError for what is no version.
    """
    found = [fact.problem(config, deepspeed, torch) for fact in FACTS]
    return [message for message in found if message] + _combinations(config)


def waiting(config: Mapping[str, Any], deepspeed: str, device: str) -> tuple[dict[str, Any], list[str]]:
    """The ds_config that gathers parameters rightly on this kind of device ("cpu", "cuda"), and a note if it does not.

    What the user said of that key stands.
    """
    if device != "cpu" or stage(config) != 3 or key(deepspeed) >= key(GATHERS_WAIT_SINCE):
        return dict(config), []
    zero = config["zero_optimization"]
    notes = []
    if not zero.get(SEQUENTIAL, True):
        notes.append(
            f"ds_config.zero_optimization.{SEQUENTIAL}: False, by your hand; DeepSpeed {deepspeed} on CPUs then reads "
            "parameters before they are there, and the losses are wrong (DeepSpeed#8539, mended in "
            f"{GATHERS_WAIT_SINCE}): leave the key out, or update DeepSpeed"
        )
    return {**config, "zero_optimization": {SEQUENTIAL: True, **zero}}, notes


def _combinations(config: Mapping[str, Any]) -> list[str]:
    """What no version of DeepSpeed does."""
    found = []
    if _autotp(config) and not at(config, "bf16.enabled"):
        found.append(
            f"ds_config {_TP} {at(config, _TP)}: bf16.enabled is not true, AutoTP needs it: precision.param=bf16"
        )
    if _deepcompile(config) and stage(config) == 0:
        found.append(
            f"ds_config {_DC} True: ZeRO stage is 0, and DeepCompile does stages 1 to 3; "
            "DeepSpeed would use torch.compile without saying so: choose a stage, or compile=true"
        )
    return found
