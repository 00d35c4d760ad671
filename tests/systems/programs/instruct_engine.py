"""Like open-instruct's inference engines: a separate job with its own group. `instruct_engine.py FOLDER HOST PORT`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from instruct_trainer import ROUNDS, model
from saying import bits, say

import hpcinit


def main() -> None:
    folder, host, port = sys.argv[1:]
    with hpcinit.session() as run:
        group = hpcinit.side_group(
            "weights", rank=1 + run.rank, world_size=1 + run.world_size, address=host, port=int(port), backend="gloo"
        )
        mine, got = model(), []
        for _ in range(ROUNDS):
            for parameter in mine.parameters():
                dist.broadcast(parameter.data, src=0, group=group)
            got.append(bits(mine.parameters()))
        total = torch.ones(1)
        dist.all_reduce(total)  # in the engines' group
        dist.destroy_process_group(group)
        say(folder, run, got=got, own=total.item())


if __name__ == "__main__":
    main()
