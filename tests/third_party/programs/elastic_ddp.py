"""A worker for torch's elastic launcher: DistributedDataParallel on a toy model, with a state that survives a restart."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STATE = Path(os.environ.get("STATE", "state.pt"))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layer = torch.nn.Linear(1, 1)
    step = 0
    if STATE.exists():
        state = torch.load(STATE)
        layer.load_state_dict(state["layer"])
        step = state["step"]
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    seen = []
    while step < 2:
        optimizer.zero_grad()
        x = torch.tensor([[float(4 * step + rank)]])
        torch.nn.functional.mse_loss(model(x), 2 * x + 1).backward()
        optimizer.step()
        seen.append(x.item())
        step += 1
        if rank == 0:
            torch.save({"layer": layer.state_dict(), "step": step}, STATE)
        dist.barrier()
        if "--fail-once" in sys.argv and step == 1 and rank == 3:  # the next attempt starts after step 1
            raise RuntimeError("a bad day for this rank")

    report = {
        "rank": rank,
        "world": dist.get_world_size(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "seen": seen,
        "gradient": [p.grad.flatten().tolist() for p in model.parameters()],
        "weights": [p.flatten().tolist() for p in model.parameters()],
    }
    os.write(1, f"{json.dumps(report)}\n".encode())  # one write: the workers of an agent share its stdout
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
