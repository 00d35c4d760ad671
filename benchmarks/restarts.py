"""How long does a training run lose between kill -9 of a rank and its next training step?

    python -m benchmarks.restarts [--nodes 4] [--ranks 2] [--kills 7] [--requeues 1]

It uses the real Slurm of the tests, whose nodes are namespaces of this machine (root). A job trains a small model,
saves after every step, and kills one of its ranks at every fifth step. Measured by the clock that all nodes share:
from the kill to the first step that rank 0 completes afterwards. The ways: restart.warm, launch=torchrun with
launch.max_restarts, and a requeue, in which Slurm waits two minutes before the job may start again.

It prints a Markdown table, and the medians of the parts of a warm restart.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from hpcinit.records import elastic_restarts
from tests.minislurm import MiniSlurm

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch, hpcinit
kills, every = int(sys.argv[1]), 5
with hpcinit.session() as run:
    wrapped = run.wrap(torch.nn.Linear(8, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    loaded = run.load(wrapped, "checkpoints")
    start = loaded.step if loaded else 0
    for step in range(start, every * (kills + 1)):
        wrapped.backward(wrapped(torch.randn(4, 8)).square().mean())
        wrapped.step()
        run.progress(step + 1, every * (kills + 1))
        if run.rank == 0 and step == start:
            Path(f"stepped-{step // every}").write_text(str(time.time()))
        run.save(wrapped, "checkpoints", step + 1, keep=2)
        number = (step + 1) // every
        if (step + 1) % every == 0 and number <= kills and run.rank == number % run.world_size:
            Path(f"killed-{number}").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
"""
WAYS = {
    "`launch=fork restart.warm=true`": ["launch=fork", "restart.warm=true"],
    "`launch=torchrun launch.max_restarts=99`": ["launch=torchrun", "launch.max_restarts=99"],
    "requeue, `restart.max_restarts=9`": ["launch=fork", "restart.max_restarts=9", "restart.on=[failure]"],
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restarts", description=__doc__)
    for name, default in (("nodes", 4), ("ranks", 2), ("kills", 7), ("requeues", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)
    print("| way | restarts | median s | slowest s |\n|---|--:|--:|--:|")
    parts: list[elastic_restarts.Restart] = []
    with MiniSlurm(nodes=options.nodes, gpus=8, name=f"restarts-{os.getpid()}") as slurm:
        for way, words in WAYS.items():
            kills = options.requeues if "requeue" in way else options.kills
            if kills:
                with tempfile.TemporaryDirectory() as folder:
                    lost = measure(
                        slurm,
                        Path(folder),
                        [f"nodes={options.nodes}", f"ranks_per_node={options.ranks}", *words],
                        kills,
                    )
                    parts += elastic_restarts.read(Path(folder, "runs/train-0001")) if "warm" in way else ()
                print(f"| {way} | {len(lost)} | {median(lost):.2f} | {max(lost):.2f} |", flush=True)
    print("\nmedians of the parts of a warm restart, s:")
    for part in elastic_restarts.PHASES:
        print(f"  {part:10}  {median(one.phases.get(part, 0.0) for one in parts):.3f}")
    return 0


def measure(slurm: MiniSlurm, folder: Path, words: Sequence[str], kills: int) -> list[float]:
    """Return the seconds from each kill to the next step."""
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "hpcinit", "submit", "cluster=mini", "parallel=ddp", "runs_dir=runs", *words]
    env = {**os.environ, **slurm.env}
    subprocess.run([*command, "--", "train.py", str(kills)], cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
    last, until = folder / f"stepped-{kills}", time.monotonic() + 300 * (kills + 1)
    while not last.exists():
        if time.monotonic() > until:
            raise TimeoutError(
                f"{folder} did not reach its last start: {(folder / 'runs/train-0001/logs/job.log').read_text()}"
            )
        time.sleep(0.5)
    while '"exit_status"' not in (folder / "runs/train-0001/exit.json").read_text():
        time.sleep(0.5)
    times = [
        (float((folder / f"{name}-{number}").read_text()))
        for number in range(1, kills + 1)
        for name in ("killed", "stepped")
    ]
    return [after - before for before, after in zip(times[::2], times[1::2], strict=True)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
