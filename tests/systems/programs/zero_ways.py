"""OpenRLHF's DeepSpeed environment on 2 nodes x 2 ranks, with AutoTP in the given stages: `zero_ways.py FOLDER STAGE...`.

Nothing in it is compiled."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from saying import numbers, say
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hpcinit
from hpcinit import Layout, Precision, Samples, Training
from hpcinit.runtime import mesh

LR, STEPS = 0.1, 2
CPU = {"offload_optimizer": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 1, offload": {"zero_stage": 1, **CPU},
    "zero 2": {"zero_stage": 2},
    "zero 2, offload": {"zero_stage": 2, **CPU},
    "zero 3": {"zero_stage": 3},
    "zero 3, offload": {"zero_stage": 3, **CPU, "offload_param": "cpu"},
    "zero 2, optimizer by name": {"zero_stage": 2, "optimizer": "torch_adamw", "optimizer_params": {"lr": LR}},
    "zero 3, optimizer by name": {"zero_stage": 3, "optimizer": "torch_adamw", "optimizer_params": {"lr": LR}},
}


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(total: int) -> Tensor:
    return torch.randn(total, 4, generator=torch.Generator().manual_seed(4))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD, because Adam hides gradients that are wrong by a constant factor."""
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def planned(run: hpcinit.Runtime, **changes: Any) -> hpcinit.Runtime:
    """Return `run` with changed settings."""
    return replace(run, plan=replace(run.plan, **changes))


def train(run: hpcinit.Runtime, options: dict[str, Any]) -> tuple[Any, list[float]]:
    """Return the engine, and all weights after the steps."""
    with_deepspeed = planned(run, training=Training("deepspeed", deepspeed=options))
    wrapped = with_deepspeed.wrap(model(), optimizer=None if "optimizer" in options else optimizer)
    for _ in range(STEPS):
        for piece in data(run.batch.total)[run.data_rank :: run.batch.data_parallel].split(run.batch.micro):
            wrapped.backward(wrapped(piece).square().mean())
            wrapped.step()
    with deepspeed.zero.GatheredParameters(list(wrapped.model.parameters()), enabled=options["zero_stage"] == 3):
        return wrapped.engine, numbers(wrapped.model)


def alone(total: int, by_name: bool) -> list[float]:
    """Do the same on one rank with plain torch."""
    made = model()
    plain = torch.optim.AdamW(made.parameters(), lr=LR) if by_name else optimizer(made.parameters())
    for _ in range(STEPS):
        plain.zero_grad()
        made(data(total)).square().mean().backward()
        plain.step()
    return numbers(made)


@torch.no_grad()
def evaluation(run: hpcinit.Runtime, stage: int) -> dict[str, Any]:
    """Evaluate a reference model without an optimizer before and after another model is trained."""
    asked = Training("deepspeed", deepspeed={"zero_stage": stage, **CPU}, gradient_clip=1.0)
    reference = planned(run, training=asked).wrap(model())
    before = reference(data(4))
    with torch.enable_grad():
        train(run, {"zero_stage": stage, **CPU})
    config = reference.engine._config
    same = [torch.equal(reference(data(4)), before), torch.allclose(before, model()(data(4)), atol=1e-6)]
    read = [config.zero_optimization_stage, config.gradient_accumulation_steps]
    return {"same": same, "read": read, "optimizer": reference.optimizer is not None}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(6)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_key_value_heads=4, max_position_embeddings=16, **shape))


def divided(run: hpcinit.Runtime, stage: int) -> dict[str, Any]:
    """Compare one SGD step of AutoTP (tp 2 x dp 2, bf16) with the whole model: output and update."""
    layout = Layout(dp_replicate=2, tp=2)
    training = Training("deepspeed", Precision("bf16", "fp32"), deepspeed={"zero_stage": stage})
    there = planned(run, training=training, layout=layout, batch=Samples(2).over(2))
    there = replace(there, mesh=mesh.build_mesh(layout, run.device))
    whole, tokens = llama(), torch.randint(96, (4, 8), generator=torch.Generator().manual_seed(7))
    first = {name: p.detach().clone() for name, p in whole.named_parameters()}
    expected = whole(tokens).logits
    F.cross_entropy(expected.flatten(0, 1), tokens.flatten()).backward()
    wrapped = there.wrap(llama(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    mine = tokens[layout.data_rank(run.rank) :: 2]
    logits = wrapped(mine).logits
    off = (logits - expected[layout.data_rank(run.rank) :: 2]).abs().max() / expected.abs().max()
    wrapped.backward(F.cross_entropy(logits.flatten(0, 1), mine.flatten()))
    wrapped.step()
    found: dict[str, Any] = {"output": off.item(), "updates": {}, "shapes": {}}
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        parameter = wrapped.model.get_parameter(name)
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            now = parameter.detach().float().clone()
        found["shapes"][name] = list(now.shape)
        was, gradient = (part(each, now, run.rank % 2) for each in (first[name], whole.get_parameter(name).grad))
        found["updates"][name] = (((was - now) * gradient).sum() / gradient.square().sum()).item()
    return found


def part(tensor: Tensor, like: Tensor, place: int) -> Tensor:
    """Return this rank's half of `tensor`, along the dimension in which `like` is smaller."""
    for dim, size in enumerate(like.shape):
        if size < tensor.shape[dim]:
            return tensor.chunk(2, dim)[place]
    return tensor


def main() -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()
    with hpcinit.session(deepspeed=True, batch=Samples(micro=2, accumulation=2)) as run:
        found: dict[str, Any] = {
            "alone": [alone(run.batch.total, by_name) for by_name in (False, True)],
            "ways": {},
            "stages": {},
        }
        for name, options in WAYS.items():
            engine, found["ways"][name] = train(run, options)
            found["stages"][name] = engine.zero_optimization_stage()
        found["evaluation"] = {stage: evaluation(run, stage) for stage in (2, 3)}
        found["divided"] = {stage: divided(run, stage) for stage in map(int, sys.argv[2:])}
        found["compiled"] = [path.name for path in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*")]
        say(sys.argv[1], run, **found)


if __name__ == "__main__":
    main()
