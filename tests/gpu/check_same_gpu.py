"""Two ranks with NCCL on one GPU: both exit with a message that names the reason."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.gpu import starting
from tests.gpu.findings import Findings
from tests.gpu.starting import Job

LIMIT_S = 60.0


def main(found: Findings, folder: Path) -> None:
    if found.cpu:
        done = starting.run(Job("tests.gpu.check_same_gpu:bring_up", ranks=2), folder / "cpu")
        found.claim("two ranks start (gloo)", done.ok, "" if done.ok else done.tail())
    began = time.monotonic()
    # Without restricted devices hpcinit refuses on every rank if the node has one GPU.
    free = {"CUDA_VISIBLE_DEVICES": "" if found.cpu else os.environ["CUDA_VISIBLE_DEVICES"]}
    shared = starting.run(
        Job("tests.gpu.check_same_gpu:bring_up", ranks=2, env=free, limit_s=LIMIT_S), folder / "shared"
    )
    seconds = time.monotonic() - began
    lines = [line for line in shared.output.splitlines() if "Duplicate GPU" in line or "hpcinit: error" in line]
    detail = f"after {seconds:.0f} s: {' / '.join(dict.fromkeys(lines))[-600:] or shared.tail(300)}"
    found.claim(
        "two ranks that share a GPU by CUDA_VISIBLE_DEVICES end",
        shared.status not in {0, starting.STOPPED},
        detail,
        device=True,
    )
    named = "Duplicate GPU" in shared.output
    found.claim("the message names the duplicate GPU", named, detail, device=True)
    _without_variable(found, folder)


def _without_variable(found: Findings, folder: Path) -> None:
    """Check that hpcinit refuses more ranks than devices before NCCL starts."""
    count = starting.run(Job("tests.gpu.check_same_gpu:devices"), folder / "count").first
    if count > 2:
        return found.measured("more ranks than GPUs", f"this machine has {count} GPUs: not tried")
    ranks = count + 1 if count else 2
    job = Job("tests.gpu.check_same_gpu:bring_up_unrestricted", ranks=ranks, limit_s=LIMIT_S)
    done = starting.run(job, folder / "unrestricted")
    named = "has no device for itself" in done.output
    found.claim(
        "more ranks than GPUs are refused with a message", named and done.status != 0, done.tail(500), device=True
    )
    return None


# In the rank:


def bring_up() -> bool:
    """Create a group with the default backend, and do one all-reduce."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import hpcinit

    with hpcinit.session(timeout=timedelta(seconds=40)) as run:
        dist.all_reduce(torch.ones(1, device=run.device))
    return True


def bring_up_unrestricted() -> bool:
    """Do the same with every GPU of the machine visible."""
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return bring_up()


def devices() -> Any:
    """Return the number of GPUs of the machine."""
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        del os.environ["CUDA_VISIBLE_DEVICES"]
    import torch

    return torch.cuda.device_count()
