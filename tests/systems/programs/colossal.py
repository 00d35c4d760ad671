"""Like ColossalAI: find device and backend and set seeds, exactly once, from any launcher."""

from __future__ import annotations

import torch
import torch.distributed as dist
from saying import draws, refusal, say

import hpcinit


def main(folder: str) -> None:
    made = []
    original = dist.init_process_group

    def counted(*args: object, **options: object) -> None:
        made.append(options["rank"])
        original(*args, **options)

    dist.init_process_group = counted
    run = hpcinit.init(seed=1024)
    first = draws()
    again = hpcinit.init(seed=1024)
    found = {
        "same object": again is run,
        "not seeded again": draws() != first,
        "another request": refusal(hpcinit.init, seed=1025),
        "another backend": refusal(hpcinit.init, seed=1024, backend="nccl"),
        "made": list(made),
        "draws": first,
        "device": str(run.device),
        "backend": [run.backend, dist.get_backend()],
    }
    total = torch.tensor([float(run.rank)])
    dist.all_reduce(total)
    found["sum"] = total.item()
    hpcinit.shutdown()
    found["nccl on a CPU"] = refusal(hpcinit.init, seed=1024, backend="nccl")
    with hpcinit.session(seed=1024, seed_by="rank") as later:
        say(folder, later, **found, own=draws(), anew=later is not run)
