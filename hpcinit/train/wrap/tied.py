"""Checks tied parameters: parameters that several modules share, such as the embedding and the output head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hpcinit.base.errors import RequestError


@dataclass(frozen=True)
class Place:
    """A place where a model uses a parameter.

    name: its full name, such as 'head.weight'.
    attribute: the last part of the name.
    """

    module: nn.Module
    attribute: str
    name: str


def ties(model: nn.Module) -> list[list[Place]]:
    """Return, for each tied parameter, all places where the model uses it."""
    found: dict[int, list[Place]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            place = Place(module, attribute, f"{prefix}.{attribute}".lstrip("."))
            found.setdefault(id(parameter), []).append(place)
    return [places for places in found.values() if len(places) > 1]


def refuse_broken(before: list[list[Place]]) -> None:
    """Raise RequestError if fully_shard or a tp_plan has replaced a tied parameter in only some of its places.

    torch does not report this, and each place would train a separate copy.

    before: what ties() returned before the model was wrapped.
    """
    for places in before:
        if len({id(getattr(place.module, place.attribute)) for place in places}) > 1:
            raise RequestError(
                f"{' and '.join(place.name for place in places)} are one tied parameter, but parallel.wrap or the "
                "tp_plan would make a copy for each name. Untie them, or use parallel.wrap=ddp. Or keep them "
                "together: remove them from the tp_plan, and put all of them in one block or in none "
                "(run.wrap(blocks=[...]))"
            )


def refuse_for_autotp(model: nn.Module, tp: int) -> None:
    """Raise RequestError if a linear layer shares its weight, as a tied output head does.

    AutoTP (DeepSpeed 0.18.5 to 0.19.8) divides the layer's output but does not join the parts, so the logits are wrong.
    """
    for places in ties(model):
        for place in places:
            if isinstance(place.module, nn.Linear):
                others = " and ".join(other.name for other in places if other is not place)
                raise RequestError(
                    f"{place.name} is tied to {others}, and DeepSpeed's AutoTP would compute wrong logits "
                    f"(parallel.tp is {tp}, deepspeed.autotp is true). Untie them (Hugging Face: "
                    "tie_word_embeddings=False), use parallel.tp=1, or use parallel.wrap=fsdp with a tp_plan"
                )
