"""A second NCCL group beside the training group, and NCCL between two GPUs where the machine has them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hpcinit.records.layout import Layout
from tests.gpu import starting
from tests.gpu.findings import NOT_SHOWN, Findings
from tests.gpu.starting import Job

ENV_DEVICES = "GPU_SUITE_DEVICES"  # the GPUs of the suite, from before it restricts itself to the first one


def main(found: Findings, folder: Path) -> None:
    devices = os.environ.get(ENV_DEVICES, "").split(",") if not found.cpu else ["", ""]
    two = len(devices) > 1
    ranks = 2 if two else 1
    port = starting.free_port()
    trainer = Job(
        "tests.gpu.check_groups:train", ranks, args={"port": port, "members": ranks}, layout=Layout(dp_replicate=1, tp=ranks),
        env={"CUDA_VISIBLE_DEVICES": ",".join(devices[:2])} if not found.cpu else {},
    )  # fmt: skip
    # Rank 0 has the first GPU: NCCL refuses two members of one group on one device.
    engine = Job("tests.gpu.check_groups:receive", args={"port": port}, env={"CUDA_VISIBLE_DEVICES": devices[-1]})
    with ThreadPoolExecutor() as pool:
        outside = pool.submit(starting.run, engine, folder / "engine") if two else None
        done = starting.run(trainer, folder / "trainer")
        received = outside.result() if outside else None
    name = f"the training group has {ranks} rank{'s' * two}"
    if not found.claim(f"{name}, and a second group works beside it", done.ok, "" if done.ok else done.tail()):
        return
    for number, sums in enumerate((done.first["before"], done.first["during"], done.first["after"])):
        when = ("before", "while it exists", "after it is destroyed")[number]
        found.claim(f"the training group sums right {when}", sums == [float(ranks)] * 2, str(sums))
    backends = [done.first["backend"], done.first["side_backend"]]
    found.claim("both groups are NCCL's", backends == ["nccl"] * 2, ", ".join(backends), device=True)
    if not two:
        why = "this machine has one GPU, and NCCL refuses two ranks on it: run make gpu where there are two"
        found.add("NCCL between two GPUs", NOT_SHOWN, why)
        found.add("weights reach a process outside of the job, over NCCL", NOT_SHOWN, why)
        return
    used = [each["device"] for each in done.results]
    found.claim("each rank has its own GPU", len(set(used)) == 2, ", ".join(used), device=True)
    assert received is not None
    right = received.ok and received.first["weights"] == done.first["weights"]
    detail = f"{received.first['weights']} on {received.first['device']}" if received.ok else received.tail()
    found.claim("weights reach a process outside of the job", right, detail)


# In the rank:


def train(port: int, members: int) -> dict[str, Any]:
    """Sum over the training group and a group of the mesh before, during and after rank 0's second group."""
    import torch
    import torch.distributed as dist

    import hpcinit

    with hpcinit.session() as run:
        torch.manual_seed(3)
        weights = torch.randn(1000, device=run.device)

        def sums() -> list[float]:
            found = []
            for group in (None, run.group("tp")):
                value = torch.ones(1, device=run.device)
                dist.all_reduce(value, group=group)
                found.append(value.item())
            return found

        before, backend = sums(), ""
        if run.rank == 0:
            side = _side(run.backend, port, rank=0, members=members)
            backend = dist.get_backend(side)
            dist.broadcast(weights, src=0, group=side)
            dist.barrier(group=side)
        during = sums()
        if run.rank == 0:
            dist.destroy_process_group(side)
        return {
            "before": before, "during": during, "after": sums(), "device": str(run.device), "backend": run.backend,
            "side_backend": backend, "weights": weights.sum().item(),
        }  # fmt: skip


def receive(port: int) -> dict[str, Any]:
    """Receive the weights, as an inference engine of another job does."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    side = _side("nccl" if on_gpu else "gloo", port, rank=1, members=2)
    weights = torch.zeros(1000, device=device)
    dist.broadcast(weights, src=0, group=side)
    dist.barrier(group=side)
    dist.destroy_process_group(side)
    return {"weights": weights.sum().item(), "device": str(device)}


def _side(backend: str, port: int, rank: int, members: int) -> Any:
    import hpcinit

    where = {"address": "127.0.0.1", "port": port, "backend": backend}
    return hpcinit.side_group("weights", rank=rank, world_size=members, **where)
