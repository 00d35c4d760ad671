"""Like open-instruct's trainer: torch, then DeepSpeed with ZeRO 3, and weights sent in a second group. `... FOLDER PORT`."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from saying import bits, say
from torch import nn

import hpcinit
from hpcinit import Samples, Training
from hpcinit.runtime import process_group
from hpcinit.train.wrap import Wrapped

ROUNDS, SENT_TO = 2, 2  # number of transfers of the weights, and number of engines


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step(run: hpcinit.Runtime, wrapped: Wrapped) -> float:
    piece = torch.randn(2, 4, generator=run.loader_options()["generator"])
    loss = wrapped(piece).square().mean()
    wrapped.backward(loss)
    wrapped.step()
    return loss.item()


def send(wrapped: Wrapped, group: dist.ProcessGroup | None) -> str:
    """Send the parameters one after the other; each is gathered during its transfer."""
    sent = []
    for parameter in wrapped.model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            sent.append(parameter.detach().clone())
            if group is not None:
                dist.broadcast(sent[-1], src=0, group=group)
    return bits(sent)


def main() -> None:
    made = []
    original = dist.init_process_group

    def watched(*args: object, **options: object) -> None:
        made.append([options.get("device_id"), deepspeed.comm.is_initialized()])
        original(*args, **options)

    dist.init_process_group = watched
    with hpcinit.session(batch=Samples(micro=2), training=Training("deepspeed", deepspeed={"zero_stage": 3})) as run:
        found = {"made": list(made), "deepspeed": deepspeed.comm.is_initialized(), "bound": process_group.bound_to()}
        wrapped = run.wrap(model(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        group = None
        if run.rank == 0:
            group = hpcinit.side_group(
                "weights", rank=0, world_size=1 + SENT_TO, address=run.hosts[0], port=int(sys.argv[2]), backend="gloo"
            )
        losses, sent = [], []
        for _ in range(ROUNDS):
            losses.append(step(run, wrapped))
            sent.append(send(wrapped, group))
        if group is not None:
            dist.destroy_process_group(group)
        losses.append(step(run, wrapped))
        say(sys.argv[1], run, **found, losses=losses, sent=sent, last=send(wrapped, None))


if __name__ == "__main__":
    main()
