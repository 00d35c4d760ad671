"""The user's own ds_config over ours: theirs wins, and what it contradicts is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcinit.facts.batch import solve
from hpcinit.facts.errors import RequestError

TRIPLE = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
# A choice and its parameters: with another choice, ours are of no use.
CHOICES = ("optimizer", "scheduler")
TRAINING = ("optimizer", "scheduler", "compile", "gradient_clipping", "checkpoint")
# Where "auto" means something to DeepSpeed itself. Anywhere else it is Hugging Face's word, and DeepSpeed fails on it.
AUTO = ("data_types.keep_in_fp32_modules", "pipeline.stages")


def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any], counted: int) -> tuple[dict[str, Any], list[str]]:
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


def without_training(theirs: Mapping[str, Any]) -> dict[str, Any]:
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
    return path in CHOICES and "type" in theirs and len(set(types)) > 1


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
