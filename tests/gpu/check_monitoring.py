"""The cost of progress(), should_stop() and the heartbeat in a training run with steps of 20 ms on the device."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import starting
from tests.gpu.findings import Findings
from tests.gpu.starting import Job

STEP_S = 0.020
MOST = 0.01  # of a step


def main(found: Findings, folder: Path) -> None:
    steps, blocks = (50, 1) if found.cpu else (150, 4)
    job = Job("tests.gpu.check_monitoring:train", args={"steps": steps, "blocks": blocks}, limit_s=180)
    done = starting.run(job, folder / "run")
    if not found.claim("a training run with all three succeeds", done.ok, "" if done.ok else done.tail()):
        return
    one = done.first
    step, calls = median(one["without"]) / steps, median(one["calls"]) / steps
    longer = [(a - b) / steps for a, b in zip(one["with"], one["without"], strict=True)]
    detail = (
        f"step {1000 * step:.2f} ms without, the calls take {1e6 * calls:.0f} us ({100 * calls / step:.2f} %); "
        f"a step with them is {1e6 * median(longer):+.0f} us longer ({100 * median(longer) / step:+.2f} %, of "
        f"{blocks} pairs of blocks of {steps} steps: {1e6 * min(longer):+.0f} to {1e6 * max(longer):+.0f} us)"
    )
    found.measured("a step", detail, step_s=step, calls_s=calls, longer_s=longer)
    found.claim("the calls take less than 1 % of a step", calls < MOST * step, detail, device=True)
    found.claim("a step with them is less than 1 % longer", median(longer) < MOST * step, detail, device=True)
    there = sorted(path.name for path in done.folder.iterdir())
    found.claim(
        "progress and heartbeat were written", "progress.json" in there and "heartbeats" in there, ", ".join(there)
    )


# In the rank:


def train(steps: int, blocks: int) -> dict[str, Any]:
    """Run blocks of steps with and without the three calls in turn; return the seconds of each block and of its calls."""
    import time

    import torch
    import torch.distributed as dist

    import hpcinit

    found: dict[str, list[float]] = {"with": [], "without": [], "calls": []}
    total, done = 2 * (blocks + 1) * steps, 0
    with hpcinit.session() as run:
        work = _worker(run.device)
        value = torch.ones(1, device=run.device)
        for block in range(2 * (blocks + 1)):  # the first pair warms up: should_stop() times its agreements in it
            helped = block % 2 == 0
            began, calls = time.perf_counter(), 0.0
            for _ in range(steps):
                work()
                dist.all_reduce(value)
                value.item()  # waits for the device, as printing a loss does
                done += 1
                if helped:
                    entered = time.perf_counter()
                    run.progress(done, total, loss=1.0)
                    run.should_stop()
                    calls += time.perf_counter() - entered
            seconds = time.perf_counter() - began
            if block < 2:
                continue
            found["with" if helped else "without"].append(seconds)
            if helped:
                found["calls"].append(calls)
        time.sleep(1.5)  # the heartbeat is written about once a second
    return found


def _worker(device: Any) -> Any:
    """Return a function that keeps the device busy for STEP_S: a spinning kernel, or a sleep on a CPU."""
    import time

    import torch

    if device.type == "cpu":
        return lambda: time.sleep(STEP_S)
    cycles = 1_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(20 * cycles)
    torch.cuda.synchronize()
    cycles = int(20 * cycles * STEP_S / (time.perf_counter() - began))
    return lambda: torch.cuda._sleep(cycles)
