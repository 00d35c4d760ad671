"""How long does it take to submit a sweep of a thousand tasks, and to show a script for thousands of nodes?

    python -m benchmarks.sweep [--rounds 5] [--tasks 1000] [--venv DIR]

It measures whole processes in rounds (A B C, A B C, ...) on the real Slurm of the tests (root). The first round does
not count. The partition is DOWN, so that Slurm starts no job. Each array must be in the queue; it is then cancelled.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median

from benchmarks import submit
from tests.minislurm import MiniSlurm

BARE = "bare `sbatch --array`"


@dataclass
class Contender:
    name: str
    command: Sequence[str]
    queues: bool = True
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = submit._parser()
    parser.prog, parser.description = "python -m benchmarks.sweep", __doc__
    parser.add_argument("--tasks", type=int, default=1000)
    parser.set_defaults(rounds=5)
    options = parser.parse_args(arguments)
    present = submit._install(options.venv)
    contenders = _contenders(options, present)
    with submit._project() as project:
        for number in range(options.rounds + 1):
            # A new cluster each round: the controller keeps cancelled jobs for MinJobAge, and at most 10,000 jobs.
            with MiniSlurm(nodes=2, gpus=8, name=f"bench-{os.getpid()}") as slurm:
                slurm.run("scontrol", "update", "PartitionName=main", "State=DOWN")
                for contender in contenders:
                    _measure(contender, slurm, project, options.tasks, counted=number > 0)
                slurm_version = slurm.version()
    print(_report(contenders, slurm_version, options))
    return 0


def _contenders(options: argparse.Namespace, present: set[str]) -> list[Contender]:
    ours = [sys.executable, "-m", "hpcinit.submit", "cluster=mini", "ranks_per_node=1", "time_min=10"]
    dry = [*ours, "dry_run=true", "partition=large"]
    script = ["--partition=main", "--nodes=1", "--output=/dev/null", "job.sh"]
    found = [
        Contender(BARE, ["sbatch", f"--array=0-{options.tasks - 1}", *script]),
        Contender("`hpcinit submit -m`", [*ours, "-m", f"seed=range(0,{options.tasks})", "--", "true"]),
        Contender("dry run, nodes=2", [*dry, "nodes=2", "--", "true"], queues=False),
        Contender("dry run, nodes=4096", [*dry, "nodes=4096", "--", "true"], queues=False),
    ]
    if "submitit" in present:
        python = str(options.venv.absolute() / "bin/python")
        found.insert(1, Contender("submitit, batch mode", [python, "submitit_sweep.py", str(options.tasks)]))
    return found


def _measure(contender: Contender, slurm: MiniSlurm, project: Path, tasks: int, *, counted: bool) -> None:
    env, before, start = submit._environment(slurm.env), submit._children_cpu_s(), time.perf_counter()
    done = subprocess.run(contender.command, cwd=project, env=env, capture_output=True, text=True, check=False)
    wall, cpu = time.perf_counter() - start, submit._children_cpu_s() - before
    queued = slurm.run("squeue", "--noheader", "--array", "--format=%F").split()
    if done.returncode or len(queued) != tasks * contender.queues:
        raise submit.SubmissionFailed(f"{contender.name}: {len(queued)} tasks queued\n{done.stderr or done.stdout}")
    if queued:
        slurm.run("scancel", *set(queued))
    if counted:
        contender.wall.append(wall)
        contender.cpu.append(cpu)


def _report(contenders: Sequence[Contender], slurm_version: str, options: argparse.Namespace) -> str:
    base = next(c for c in contenders if c.name == BARE)
    dry = next(c for c in contenders if not c.queues)
    lines = [
        f"{datetime.date.today()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}, Slurm {slurm_version}, "
        f"hydra-core {version('hydra-core')}, submitit {version('submitit')}; {options.tasks} tasks, {options.rounds} "
        f"rounds, load average at the end {os.getloadavg()[0]:.1f}",
        "",
        "| | median s | min | max | CPU s | over bare s, median of rounds | x nodes=2, median of rounds |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for c in contenders:
        numbers = [f"{s:.2f}" for s in (median(c.wall), min(c.wall), max(c.wall), median(c.cpu))]
        over = f"{median(a - b for a, b in zip(c.wall, base.wall, strict=True)):.2f}" if c.queues else ""
        ratio = "" if c.queues else f"{median(a / b for a, b in zip(c.wall, dry.wall, strict=True)):.2f}"
        lines.append(f"| {c.name} | {' | '.join([*numbers, over, ratio])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
