"""The ranks of test_checkpoint: train and save with the most ranks of each case, continue; then continue with fewer.

    checkpointing.py FOLDER OUT [name ...]

Rank 0 writes the losses of each step to OUT: {name: {"before": [...], "after": [...], ...}}.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

import hpcinit
from hpcinit.jobs.train_gpt import GPT, TENSOR_PARALLEL
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Training
from hpcinit.runtime import mesh
from hpcinit.train import checkpoint
from hpcinit.train import wrap as wrapping

STEPS, MORE, CONTEXT, GLOBAL_BATCH = 4, 3, 16, 16
LR, CLIP = 1e-2, 1.0
SIZES = (4, 2)


def cases() -> dict[str, dict[int, tuple[Layout, Training]]]:
    """Return name -> layout for this number of ranks, and settings."""
    ddp, fsdp = Training("ddp", gradient_clip=CLIP), Training("fsdp", gradient_clip=CLIP)
    recomputing = Training("fsdp", activation_checkpointing="full", gradient_clip=CLIP)
    sharded = Layout(dp_replicate=1, dp_shard=-1)
    found = {
        "ddp": dict.fromkeys(SIZES, (Layout(), ddp)),
        "fsdp": {4: (sharded, recomputing), 2: (Layout(), ddp)},
        "hsdp 2x2": {4: (Layout(dp_replicate=2, dp_shard=2), fsdp), 2: (sharded, fsdp)},
        "hsdp 2x2 x tp 2": {  # a mesh of three dimensions needs 8 ranks
            8: (Layout(dp_replicate=2, dp_shard=2, tp=2), fsdp),
            4: (Layout(dp_replicate=1, dp_shard=2, tp=2), fsdp),
        },
    }
    for stage in range(4):
        found[f"zero {stage}"] = dict.fromkeys(SIZES, (Layout(), zero(stage)))
    return found


def zero(stage: int, **more: str) -> Training:
    return Training("deepspeed", gradient_clip=CLIP, deepspeed={"zero_stage": stage, **more})


def texts() -> Tensor:
    """Return tokens of shape (samples, context + 1). Each follows from the one before, with some errors."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(96, ((STEPS + MORE) * GLOBAL_BATCH, CONTEXT + 1), generator=generator)
    slips = torch.rand(tokens.shape, generator=generator) < 0.1
    for at in range(1, CONTEXT + 1):
        tokens[:, at] = torch.where(slips[:, at], tokens[:, at], (5 * tokens[:, at - 1] + 7) % 96)
    return tokens


class Noisy(GPT):
    """A dropout that uses the generators of Python, NumPy and torch."""

    @staticmethod
    def share() -> float:
        return 0.2 + 0.2 * random.random() + 0.2 * float(np.random.random())

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return F.dropout(super().forward(tokens, positions), self.share())


class Program:
    """A model, its optimizer and a loader on this rank."""

    def __init__(
        self,
        run: hpcinit.Runtime,
        layout: Layout,
        training: Training,
        lr: float = LR,
        width: int = 32,
        kind: type[GPT] = GPT,
    ) -> None:
        self.run, self.layout = run, layout.over(run.world_size)
        ranks = self.layout.data_parallel
        self.batch = Batch(GLOBAL_BATCH // ranks, 1, ranks)
        torch.manual_seed(7)
        self.wrapped = wrapping.wrap(
            kind(context=CONTEXT, width=width, layers=1, heads=4),
            mesh=mesh.build_mesh(self.layout, run.device),
            layout=self.layout,
            device=run.device,
            batch=self.batch,
            training=training,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
            tp_plan=TENSOR_PARALLEL if self.layout.tp > 1 else None,
        )
        self.take(0)

    def take(self, first: int) -> None:
        """Return a loader of this rank's share of the samples from `first` on."""
        data, mine = texts(), self.layout.data_rank(self.run.rank)
        order = range(first + mine, len(data), self.layout.data_parallel)
        self.loader = StatefulDataLoader(data, batch_size=self.batch.micro, sampler=order, generator=torch.Generator())
        self._batches: Iterator[Tensor] | None = None

    def steps(self, number: int) -> list[float]:
        self._batches = self._batches or iter(self.loader)
        return [self._step(next(self._batches)) for _ in range(number)]

    def _step(self, tokens: Tensor) -> float:
        logits = self.wrapped(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.wrapped.backward(loss)
        assert self.wrapped.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean) / self.run.world_size

    def save(self, folder: Path, step: int, **more: Any) -> Path:
        more = {"loader": self.loader, **more}
        return checkpoint.save(self.wrapped, folder, step, layout=self.layout, seed=self.run.seed, **more)

    def load(self, folder: Path) -> checkpoint.Loaded:
        loaded = checkpoint.load(self.wrapped, folder, layout=self.layout, loader=self.loader, seed_by="rank")
        assert loaded is not None
        return loaded


def write(run: hpcinit.Runtime, folder: Path, layout: Layout, training: Training) -> dict[str, Any]:
    """Train, save, continue; then continue from the checkpoint in a new model, and once without optimizer state."""
    one = Program(run, layout, training)
    found: dict[str, Any] = {"before": one.steps(STEPS)}
    one.save(folder, STEPS, extra={"note": torch.arange(3)})
    found["after"] = one.steps(MORE)
    found |= go_on(run, folder, layout, training)
    if training.wrap == "ddp":
        half = Program(run, layout, training)
        half.load(folder)
        assert half.wrapped.optimizer is not None
        half.wrapped.optimizer.state.clear()
        found["without the optimizer"] = half.steps(MORE)
    return found


def go_on(run: hpcinit.Runtime, folder: Path, layout: Layout, training: Training) -> dict[str, Any]:
    """Continue from the checkpoint, which restores the learning rate and the loader's position."""
    one = Program(run, layout, training, lr=7 * LR)
    loaded = one.load(folder)
    if not loaded.loader:
        one.take(loaded.samples)
    told = [loaded.step, loaded.samples, loaded.extra["note"].tolist(), loaded.loader]
    return {"loaded": told, "again": one.steps(MORE)}


def main() -> None:
    folder, out, *names = sys.argv[1:]
    with hpcinit.session(deepspeed=True) as run:
        found = {}
        for name, sizes in cases().items():
            if run.world_size not in sizes or (names and name not in names):
                continue
            began = time.monotonic()
            work = write if run.world_size == max(sizes) else go_on
            found[name] = work(run, Path(folder, name), *sizes[run.world_size])
            if run.rank == 0:
                print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        if run.rank == 0:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
