"""launch=fork with a CUDA build: memory of the fork server, the ranks' contexts, and the time to the first all-reduce."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import device, starting
from tests.gpu.findings import NOT_SHOWN, Findings
from tests.gpu.starting import FORK, PLAIN, TORCHRUN, Job, Started

WAYS = (FORK, PLAIN, TORCHRUN)
ROUNDS = 5
ROUNDS_S = 150.0  # for all rounds; the rest of the check's time is for the memory
PHASE_S = 90.0
SLACK_MB = 16.0


def main(found: Findings, folder: Path) -> None:
    which = device.identity()
    for ranks in (1, 8):
        _memory(found, folder, which, ranks)
    _times(found, folder)


def _memory(found: Findings, folder: Path, which: dict[str, str], ranks: int) -> None:
    """Check the memory at three points: the ranks are forked, each has a context, they have ended."""
    place = folder / f"memory-{ranks}"
    before = device.settled_mb(which)
    seen: dict[str, Any] = {}

    def meanwhile(server: int) -> None:
        _wait_for(place, "forked", ranks)
        seen["forked"] = device.used_mb(which)
        seen["files"] = device.cuda_files(server)
        (place / "go-contexts").touch()
        _wait_for(place, "context", ranks)
        gpu = device.look(which)
        seen["contexts"] = gpu.used_mb if gpu else None
        seen["listed"] = {one.pid: one.used_mb for one in gpu.processes} if gpu else {}
        seen["server"] = server
        (place / "go-on").touch()

    job = Job("tests.gpu.check_fork:share", ranks=ranks, launch=FORK, limit_s=2 * PHASE_S)
    done = starting.run(job, place, meanwhile)
    name = f"{ranks} forked rank{'s' * (ranks > 1)}"
    if not found.claim(f"{name} share one device over gloo", done.ok, "" if done.ok else done.tail()):
        return
    sums = {one["sum"] for one in done.results}
    found.claim(
        f"{name}: an all-reduce of tensors on the device is right", sums == {ranks * (ranks + 1) / 2}, str(sums)
    )
    early = [one["rank"] for one in done.results if one["initialized"]]
    found.claim(f"{name}: no rank inherits a CUDA context", not early, f"initialized before its own: {early}")
    devices = sorted({one["device"] for one in done.results})
    found.claim(f"{name}: each makes its own context", devices == ["cuda:0"], str(devices), device=True)
    used = seen["forked"] is not None and before is not None and seen["forked"] <= before + SLACK_MB
    detail = (
        f"{before} MiB before, {seen['forked']} MiB once the ranks are forked, {seen['contexts']} MiB with contexts"
    )
    found.claim(f"{name}: the fork server uses 0 MB of the device", bool(used), detail, device=True, **seen)
    found.claim(f"{name}: the fork server has no file of the driver open", not seen["files"], str(seen["files"]))
    if not found.cpu:
        _listed(found, name, seen, [one["pid"] for one in done.results])


def _listed(found: Findings, name: str, seen: dict[str, Any], pids: list[int]) -> None:
    claim = f"{name}: nvidia-smi lists the ranks and not the fork server"
    if not set(pids) & set(seen["listed"]):
        why = f"its process ids are not those of this container: {seen['listed']}, the ranks are {pids}"
        return found.add(claim, NOT_SHOWN, why)
    holds = set(pids) <= set(seen["listed"]) and seen["server"] not in seen["listed"]
    found.claim(claim, holds, f"{seen['listed']}, fork server {seen['server']}")
    return None


def _wait_for(place: Path, name: str, count: int) -> None:
    deadline = time.monotonic() + PHASE_S
    while len(list(place.glob(f"{name}-*"))) < count and time.monotonic() < deadline:
        time.sleep(0.05)


def _times(found: Findings, folder: Path) -> None:
    """Run rounds of each launcher in turn, until all are done or the time is up."""
    shapes = (1, 2) if found.cpu else (1, 8)
    rounds = 1 if found.cpu else ROUNDS
    took: dict[tuple[int, str], list[float]] = {(ranks, way): [] for ranks in shapes for way in WAYS}
    deadline = time.monotonic() + (1e9 if found.cpu else ROUNDS_S)
    for number in range(rounds + 1):  # the first fills the file cache and is not counted
        for (ranks, way), seconds in took.items():
            if number > 1 and time.monotonic() > deadline:
                break
            done = _start(folder / f"{number}-{ranks}-{way.replace(' ', '-')}", ranks, way)
            if not done.ok:
                found.claim(f"{ranks} ranks start with {way}", False, done.tail())
                return
            if number:
                seconds.append(max(one["at"] for one in done.results) - done.start_s)
    for ranks in shapes:
        words = [
            f"{way} {median(took[ranks, way]):.2f} s ({min(took[ranks, way]):.2f} to {max(took[ranks, way]):.2f}, "
            f"{len(took[ranks, way])} rounds)"
            for way in WAYS
        ]
        values = {way: took[ranks, way] for way in WAYS}
        found.measured(f"time to the first all-reduce, {ranks} ranks", "; ".join(words), device=True, **values)


def _start(folder: Path, ranks: int, way: str) -> Started:
    preload = ("torch", "hpcinit.runtime.bringup")
    job = Job("tests.gpu.check_fork:first_all_reduce", ranks=ranks, launch=way, preload=preload, limit_s=100)
    return starting.run(job, folder)


# In the rank:


def share() -> dict[str, Any]:
    """Create this rank's context on request, then a gloo group with tensors on the device."""
    import torch
    import torch.distributed as dist

    import hpcinit

    place, rank = Path(os.environ["HPCINIT_RUN"]), int(os.environ["SLURM_PROCID"])
    initialized = torch.cuda.is_initialized()
    (place / f"forked-{rank}").touch()
    _until(place / "go-contexts")
    on = "cuda" if torch.cuda.is_available() else "cpu"
    torch.zeros(1, device=on)
    (place / f"context-{rank}").touch()
    _until(place / "go-on")
    with hpcinit.session(backend="gloo") as run:
        value = torch.full((1,), float(rank + 1), device=run.device)
        dist.all_reduce(value)
        found = {"rank": rank, "pid": os.getpid(), "device": str(run.device), "sum": value.item()}
    return {**found, "initialized": initialized}


def _until(path: Path) -> None:
    deadline = time.monotonic() + PHASE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not created in {PHASE_S:.0f} s")
        time.sleep(0.05)


def first_all_reduce() -> dict[str, Any]:
    """Return when the first all-reduce on the device finished."""
    import torch
    import torch.distributed as dist

    import hpcinit

    with hpcinit.session(backend="gloo") as run:
        value = torch.ones(1, device=run.device)
        dist.all_reduce(value)
        assert value.item() == run.world_size
        at = time.time()
        dist.barrier()
    return {"at": at}
