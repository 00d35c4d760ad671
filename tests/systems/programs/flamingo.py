"""Like OpenFlamingo: one program for every launcher, which trains with DDP and FSDP. `flamingo.py FOLDER`."""

from __future__ import annotations

import sys

import torch
from saying import bits, numbers, say
from torch import nn

import hpcinit
from hpcinit import Layout, Samples, Training

STEPS = 3


def train(run: hpcinit.Runtime) -> dict[str, object]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    wrapped = run.wrap(model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2))
    data = torch.randn(2 * run.batch.total, 4, generator=torch.Generator().manual_seed(5))
    mine = data[run.data_rank :: run.layout.data_parallel].split(run.batch.micro)
    losses = []
    for piece in (*mine,) * STEPS:
        loss = (wrapped(piece) - piece.sum(1, keepdim=True)).square().mean()
        wrapped.backward(loss)
        wrapped.step()
        losses.append(loss.detach())
    means = torch.stack(losses)
    torch.distributed.all_reduce(means)
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    return {"losses": (means / run.world_size).tolist(), "weights": numbers(model), "bits": bits(model.parameters()),
            "held": held}  # fmt: skip


def main(folder: str) -> None:
    found = {}
    for name, layout in (("ddp", Layout()), ("fsdp", Layout(dp_replicate=1, dp_shard=-1))):
        with hpcinit.session(seed=11, layout=layout, batch=Samples(micro=2), training=Training(name)) as run:
            backend = torch.distributed.get_backend()
            found[name] = train(run) | {"backend": backend, "device": str(run.device)}
    say(folder, run, **found)


if __name__ == "__main__":
    main(sys.argv[1])
