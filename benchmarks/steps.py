"""How much time do `should_stop`, the heartbeat and `progress` add to a training step?

    python -m benchmarks.steps [--ranks 8 32] [--step-ms 50] [--steps 100] [--blocks 7]

One node, loopback, gloo, a local job. A step is a sleep and one all_reduce. It computes nothing, so that more ranks
than cores do not delay each other. Blocks of steps with and without the three calls alternate, in one process group.
The first pair does not count: should_stop() uses it to choose how often the ranks agree.

Every rank reports the CPU time of its calls and of hpcinit's threads, which run in all blocks. Rank 0 reports the time
of whole blocks, which alone contains the time of gloo's threads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
COLUMNS = (
    "ranks",
    "ms per step without",
    "agreement every n steps",
    "CPU ms a step, median rank",
    "of the most expensive rank",
    "of which threads, at most",
    "ms in the calls, rank 0",
    "additional ms per step, median",
    "min to max",
)


def rank(step_s: float, steps: int, blocks: int) -> None:
    """Print a line of JSON: seconds of each block with and without the calls, and CPU seconds of the calls."""
    import torch  # noqa: PLC0415 - only the ranks need torch
    import torch.distributed as dist  # noqa: PLC0415

    import hpcinit  # noqa: PLC0415

    results: dict[str, list[float]] = {"with": [], "without": [], "calls_cpu": [], "calls": []}
    threads = 0.0
    value, total = torch.ones(1), 2 * (blocks + 1) * steps
    with hpcinit.session() as run:
        done = 0
        for block in range(2 * (blocks + 1)):
            helped = block % 2 == 0
            dist.barrier()
            if block == 2:
                threads = _of_threads()
            start, cpu, wall = time.monotonic(), 0.0, 0.0
            for _ in range(steps):
                time.sleep(step_s)
                dist.all_reduce(value)
                done += 1
                if helped:
                    entered, used = time.monotonic(), time.thread_time()
                    run.progress(done, total, loss=1.0)
                    run.should_stop()
                    cpu, wall = cpu + time.thread_time() - used, wall + time.monotonic() - entered
            dist.barrier()
            if block < 2:
                continue
            results["with" if helped else "without"].append(time.monotonic() - start)
            if helped:
                results["calls_cpu"].append(cpu)
                results["calls"].append(wall)
        threads = _of_threads() - threads
        every = run._changing.stopper._every if run._changing.stopper else 0
    print(json.dumps({**results, "every": every, "threads_cpu": threads / (2 * blocks * steps)}), flush=True)


def _of_threads() -> float:
    """Return the CPU seconds of hpcinit's threads until now."""
    own = [thread.ident for thread in threading.enumerate() if thread.name.startswith("hpcinit-")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in own if ident)


def measure(count: int, step_s: float, steps: int, blocks: int) -> list[dict[str, Any]]:
    """Return the output of each rank. It runs a local job, because the heartbeat needs a run folder."""
    arguments = ["--rank", "--step-ms", f"{1000 * step_s:g}", "--steps", str(steps), "--blocks", str(blocks)]
    overrides = ["cluster=local", f"ranks_per_node={count}", "wait=true", "name=bench", "time_min=30"]
    with tempfile.TemporaryDirectory() as place:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "hpcinit",
            "submit",
            *overrides,
            "--",
            str(Path(__file__).resolve()),
            *arguments,
        ]
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
        logs = [Path(place) / f"runs/bench-0001/logs/rank-{number}.log" for number in range(count)]
        if done.returncode or not all(log.exists() for log in logs):
            raise SystemExit(f"benchmarks.steps: {count} ranks: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        texts = [log.read_text().splitlines() for log in logs]
    return [json.loads(next(line for line in text if line.startswith("{"))) for text in texts]


def row(count: int, results: Sequence[dict[str, Any]], steps: int) -> str:
    """Return a table row: medians over blocks; for the calls, the median rank and the most expensive one."""
    first = results[0]
    step = 1000 * median(first["without"]) / steps
    longer = [1000 * (a - b) / steps for a, b in zip(first["with"], first["without"], strict=True)]
    cpu = sorted(1000 * (median(each["calls_cpu"]) / steps + each["threads_cpu"]) for each in results)
    cells = [f"{step:.1f}", str(first["every"])]
    cells += [f"{value:.3f} ({100 * value / step:.2f} %)" for value in (median(cpu), cpu[-1])]
    cells += [
        f"{1000 * max(each['threads_cpu'] for each in results):.4f}",
        f"{1000 * median(first['calls']) / steps:.3f}",
    ]
    cells += [
        f"{median(longer):+.2f} ({100 * median(longer) / step:+.2f} %)",
        f"{min(longer):+.2f} to {max(longer):+.2f}",
    ]
    return f"| {count} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--steps", type=int, default=100, help="steps per block")
    parser.add_argument("--blocks", type=int, default=7, help="counted blocks of each kind")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        rank(options.step_ms / 1000, options.steps, options.blocks)
        return 0
    load = os.getloadavg()[0]
    results = {n: measure(n, options.step_ms / 1000, options.steps, options.blocks) for n in options.ranks}
    machine = (
        f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}, torch {version('torch')}"
    )
    print(
        f"{datetime.date.today()}, {machine}; {options.blocks} blocks of {options.steps} steps of each kind"
        f", alternating; load average {load:.1f} before and {os.getloadavg()[0]:.1f} after\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'--:|' * len(COLUMNS)}")
    for count, each in results.items():
        print(row(count, each, options.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
