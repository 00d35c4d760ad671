"""Two ranks with NCCL on one GPU, as NCCL 2.30 and newer permit: a collective, a hang, a mismatch, a killed rank, a restart.

NCCL_MULTI_RANK_GPU_ENABLE=1 is experimental: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html. With it, one
GPU shows what otherwise needs two: dumps, verdicts and ends of ranks that wait for each other over real NCCL.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hpcinit.base import versions
from hpcinit.records import safeguards
from hpcinit.why import flight_recorder, hang_verdict
from tests.gpu import starting
from tests.gpu.findings import NOT_SHOWN, Findings
from tests.gpu.starting import Job

SINCE = "2.30"
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
TIMEOUT_S = 8.0
LATE_S = 60.0  # how long a rank that hangs sleeps
LIMIT_S = 60.0
CLAIMS = ("two ranks compute on one GPU", "a hang", "a mismatch", "a killed rank", "a restart")


def main(found: Findings, folder: Path) -> None:
    if not found.cpu and versions.key(nccl := _nccl()) < versions.key(SINCE):
        for claim in CLAIMS:
            found.add(claim, NOT_SHOWN, f"NCCL {nccl}; {SINCE} and newer can have two ranks on one GPU")
        return
    done = starting.run(_job("compute"), folder / "compute")
    if not found.claim("two ranks compute on one GPU", done.results == [3.0, 3.0], done.tail(400)):
        return
    _pending(found, folder, "hang", hang_verdict.NOT_CALLED)
    _pending(found, folder, "mismatch", hang_verdict.MISMATCH)
    began = time.monotonic()
    done = starting.run(_job("killed"), folder / "killed")
    detail = f"status {done.status} after {time.monotonic() - began:.0f} s: {done.tail(300)}"
    found.claim("the other rank ends after a rank was killed", done.status not in {0, starting.STOPPED}, detail)
    done = starting.run(_job("compute"), folder / "again")
    found.claim("two new ranks start on the GPU afterwards", done.results == [3.0, 3.0], done.tail(400))


def _nccl() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def _job(name: str) -> Job:
    return Job(f"tests.gpu.check_shared_gpu:{name}", ranks=2, env=SHARED, limit_s=LIMIT_S)


def _pending(found: Findings, folder: Path, name: str, kind: str) -> None:
    """Claim that the ranks end at the timeout, that both left a dump, and that the verdict names rank 1."""
    done = starting.run(_job(name), folder / name)
    found.claim(f"{name}: the ranks end at the timeout", done.status not in {0, starting.STOPPED}, done.tail(300))
    dumps = sorted((done.folder / safeguards.FLIGHT).glob("*.rank_*"))
    both = len(dumps) == 2
    if (
        not found.claim(f"{name}: both ranks have a dump", both, str([each.name for each in dumps]), device=True)
        or not both
    ):
        return
    verdict = hang_verdict.verdict(flight_recorder.read_attempt(done.folder, dumps[0].name.partition(".")[0], None))
    named = [(culprit.rank, culprit.kind) for culprit in verdict.culprits]
    found.claim(f"{name}: the dumps name the rank", named == [(1, kind)], "; ".join(verdict.lines()) or "no line")


# In the rank:


def compute() -> float:
    """Return the sum of 1 and 2 over both ranks."""
    import torch
    import torch.distributed as dist

    import hpcinit

    with hpcinit.session() as run:
        value = torch.full((1000,), run.rank + 1.0, device=run.device)
        dist.all_reduce(value)
        return float(value[-1])


def hang() -> bool:
    """Rank 0 waits in an all-reduce that rank 1 never calls."""
    return _then(lambda: None)


def mismatch() -> bool:
    """Rank 1 calls a broadcast while rank 0 is in an all-reduce."""
    import torch
    import torch.distributed as dist

    def broadcast() -> None:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        dist.broadcast(torch.ones(7, device=device), src=1)

    return _then(broadcast)


def killed() -> bool:
    """Rank 1 is killed while rank 0 waits for it."""
    return _then(lambda: os.kill(os.getpid(), signal.SIGKILL))


def _then(rank_1: Callable[[], None]) -> bool:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import hpcinit

    run = hpcinit.init(collective_timeout=timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(torch.ones(3, device=run.device))
    if run.rank == 0:
        dist.all_reduce(torch.ones(9, device=run.device))
        if run.device.type == "cuda":
            torch.cuda.synchronize()
    else:
        rank_1()
        time.sleep(LATE_S)
    return True
