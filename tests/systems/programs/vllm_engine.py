"""Inference engines that do not use hpcinit: `vllm_engine.py FOLDER HOST PORT PEERS`, as tasks of a plain srun.

PEERS: `vllm`, join as vLLM does; `torch`, as OpenRLHF's and TRL's copies of torch's init_process_group do.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from instruct_trainer import ROUNDS, model
from saying import bits
from torch.distributed.distributed_c10d import _new_process_group_helper
from torch.distributed.rendezvous import rendezvous
from vllm_stand_in import Stateless, join


def join_by_torch(host: str, port: int, rank: int, world_size: int) -> dist.ProcessGroup:
    timeout = timedelta(minutes=5)
    store, rank, world_size = next(rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    store = dist.PrefixStore("weights", store)
    return _new_process_group_helper(world_size, rank, [], "gloo", store, group_name="weights", timeout=timeout)[0]


def main() -> None:
    folder, host, port, peers = sys.argv[1:]
    number, engines, own = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]), int(port) + 1
    dist.init_process_group("gloo", init_method=f"tcp://n3:{own}", rank=number, world_size=engines)  # the engines' own
    joined = join if peers == "vllm" else join_by_torch
    group = joined(host, int(port), 1 + number, 1 + engines)
    mine, got = model(), []
    for _ in range(ROUNDS):
        for parameter in mine.parameters():
            dist.broadcast(parameter.data, group_src=0, group=group)
        got.append(bits(mine.parameters()))
    total = torch.ones(1)
    dist.all_reduce(total)
    objects = None
    if peers == "vllm":
        other = Stateless(host, int(port) + 2, 1 + number, 1 + engines)
        objects = other.broadcast_obj(None, 0)
        other.store.set(f"read/{number}", "")
    (Path(folder) / f"said-{number}.json").write_text(json.dumps({"got": got, "own": total.item(), "objects": objects}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
