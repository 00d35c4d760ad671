"""A program for 4 ranks, or 8: run the same 12 steps of the demo's GPT with every wrapper, one after the other.

    equivalence.py OUT [name ...]

Rank 0 writes {name: {"loss": [...], "norm": [...]}} to OUT, and DeepSpeed's version. It is a file of its test because the
ranks run it.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import hpcinit
from hpcinit.jobs.train_gpt import GPT, TENSOR_PARALLEL
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Training
from hpcinit.runtime import mesh
from hpcinit.train import wrap as wrapping
from hpcinit.train.wrap import sequence

STEPS, CONTEXT, GLOBAL_BATCH, LR = 12, 32, 16, 0.3
CLIP = 0.55  # the norm is above it in some steps and below it in others
IGNORED = -100  # F.cross_entropy ignores such targets

warnings.simplefilter("ignore")  # DeepSpeed warns of deprecated calls at each collective
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its kernel takes a minute to compile


def layouts() -> dict[str, tuple[Layout, Training, int]]:
    """Return name -> layout, wrapper and accumulation."""
    ddp, fsdp = Training("ddp", gradient_clip=CLIP), Training("fsdp", gradient_clip=CLIP)
    found = {
        "ddp 4": (Layout(dp_replicate=4), ddp, 1),
        "ddp 4, accumulation 2": (Layout(dp_replicate=4), ddp, 2),
        "fsdp 4, accumulation 2, checkpointing": (
            Layout(dp_replicate=1, dp_shard=4),
            Training("fsdp", activation_checkpointing="full", gradient_clip=CLIP),
            2,
        ),
        "hsdp 2x2": (Layout(dp_replicate=2, dp_shard=2), fsdp, 1),
        "hsdp 2x4": (Layout(dp_replicate=2, dp_shard=4), fsdp, 1),
        "tp 2 x ddp 2": (Layout(dp_replicate=2, tp=2), ddp, 2),
        "tp 2 x fsdp 2": (Layout(dp_replicate=1, dp_shard=2, tp=2), fsdp, 1),
        "sp 2 x ddp 2": (Layout(dp_replicate=2, cp=2), ddp, 2),
        "sp 2 x fsdp 2, checkpointing": (
            Layout(dp_replicate=1, dp_shard=2, cp=2),
            Training("fsdp", activation_checkpointing="full", gradient_clip=CLIP),
            1,
        ),
        "sp 2 x tp 2 x hsdp 2x1": (Layout(dp_replicate=2, cp=2, tp=2), fsdp, 1),
        "zero 0, sp 2 x dp 2": (Layout(dp_replicate=2, cp=2), zero(0), 1),
        "zero 2, sp 2 x dp 2": (Layout(dp_replicate=2, cp=2), zero(2), 2),
        "zero 3, sp 2 x dp 2": (Layout(dp_replicate=2, cp=2), zero(3), 1),
        "zero 3, sp 2 x dp 4": (Layout(dp_replicate=4, cp=2), zero(3), 1),
    }
    for stage in range(4):
        found[f"zero {stage}"] = (Layout(dp_replicate=4), zero(stage), 1 + stage % 2)
        if stage:
            found[f"zero {stage}, offload"] = (Layout(dp_replicate=4), zero(stage, offload_optimizer="cpu"), 1)
    everything = zero(3, offload_optimizer="cpu", offload_param="cpu")
    return {**found, "zero 3, offload of parameters": (Layout(dp_replicate=4), everything, 1)}


def zero(stage: int, **more: str) -> Training:
    return Training("deepspeed", gradient_clip=CLIP, deepspeed={"zero_stage": stage, **more})


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return tokens and targets of each step, (global batch, context). Most tokens follow from the one before.

    In every second sample the targets of the last quarter are ignored, so that ranks have different numbers of targets.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(96, (STEPS, GLOBAL_BATCH, CONTEXT + 1), generator=generator)
    slips = torch.rand(tokens.shape, generator=generator) < 0.1
    for at in range(1, CONTEXT + 1):
        follows = (5 * tokens[..., at - 1] + 7) % 96
        tokens[..., at] = torch.where(slips[..., at], tokens[..., at], follows)
    wanted = tokens[..., 1:].clone()
    wanted[:, 1::2, -CONTEXT // 4 :] = IGNORED
    return list(zip(tokens[..., :-1], wanted, strict=True))


def model() -> GPT:
    torch.manual_seed(7)
    return GPT(context=CONTEXT, width=32, layers=2, heads=4)


def alone(lr: float = LR) -> dict[str, list[float]]:
    """Train on one rank with all data and plain torch, as the reference."""
    gpt, losses, norms = model(), [], []
    optimizer = torch.optim.SGD(gpt.parameters(), lr=lr, momentum=0.9)
    for tokens, wanted in batches():
        loss = F.cross_entropy(gpt(tokens).flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(gpt.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "norm": norms}


def together(run: hpcinit.Runtime, layout: Layout, training: Training, accumulation: int) -> dict[str, list[float]]:
    """Train on all ranks, each with its part of the data."""
    batch = Batch(GLOBAL_BATCH // accumulation // layout.data_parallel, accumulation, layout.data_parallel)
    wrapped = wrapping.wrap(
        model(),
        mesh=mesh.build_mesh(layout, run.device),
        layout=layout,
        device=run.device,
        batch=batch,
        training=training,
        # SGD, because Adam hides gradients that are wrong by a constant factor.
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9),
        tp_plan=TENSOR_PARALLEL if layout.tp > 1 else None,
    )
    losses: list[float] = []
    norms: list[float] = []
    for step in batches():
        # Each pass has the same mixture of samples, so the same number of tokens counts.
        passes = zip(*(each.chunk(accumulation) for each in step), strict=True)
        sums = torch.stack([one_pass(run, wrapped, layout, *each) for each in passes])
        dist.all_reduce(sums)
        losses.append(float((sums[:, 0] / sums[:, 1]).mean()))
        norms.append(wrapped.grad_norm)
    return {"loss": losses, "norm": norms}


def one_pass(run: hpcinit.Runtime, wrapped: wrapping.Wrapped, layout: Layout, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Run forward, backward and step. Return the sum of this rank's losses and its number of tokens."""
    mine = slice(layout.data_rank(run.rank), None, layout.data_parallel)
    tokens, wanted = sequence.shard(layout, run.rank, tokens[mine], wanted[mine])
    (positions,) = sequence.shard(layout, run.rank, torch.arange(CONTEXT), dim=0)
    logits = wrapped(tokens, positions)
    total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
    count = (wanted != IGNORED).sum()
    wrapped.backward(wrapped.mean(total, count))
    wrapped.step()
    return torch.stack([total.detach(), count.float()])


def main() -> None:
    out, *names = sys.argv[1:]
    with hpcinit.session(deepspeed=True) as run:
        curves = {"alone": alone(), "alone, learning rate 1 % higher": alone(LR * 1.01)} if run.rank == 0 else {}
        for name, (layout, training, accumulation) in layouts().items():
            if names and name not in names:
                continue
            began = time.monotonic()
            curves[name] = together(run, layout, training, accumulation)
            if run.rank == 0:
                print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        if run.rank == 0:
            Path(out).write_text(json.dumps(curves | {"deepspeed": deepspeed.__version__}))


if __name__ == "__main__":
    main()
