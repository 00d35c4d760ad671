"""How long does `hpcinit status` take for 1,000 jobs, compared with squeue?

    python -m benchmarks.status [--rounds 7] [--jobs 1000]

It measures whole processes in rounds (A B C, A B C, ...) on the real Slurm of the tests (root; see tests/minislurm).
The first round does not count. The partition is DOWN, so that all jobs wait and use no CPU time. Half of the jobs are
one array (a sweep), half are separate jobs, each with a run folder. Start-up is `hpcinit status` of one finished local
run, which needs no query of Slurm."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from hpcinit.records.spec import Program, Spec
from hpcinit.slurm.queue import FORMAT
from hpcinit.submit import folder
from tests.minislurm import MiniSlurm

STATUS = [sys.executable, "-m", "hpcinit", "status"]
SQUEUE = ["squeue", "--noheader", "--array", "--me", "--states=all"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=1000, help="number of array tasks, and of separate jobs")
    options = parser.parse_args(arguments)
    shape = {"MaxArraySize": str(options.jobs + 1), "MaxJobCount": str(4 * options.jobs)}
    name = f"bench-{os.getpid()}"
    with MiniSlurm(nodes=1, gpus=0, name=name, options=shape) as slurm, tempfile.TemporaryDirectory() as place:
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | slurm.env
        env["PYTHONPATH"] = str(Path(__file__).parents[1])
        contenders: dict[str, tuple[list[str], Path]] = {}
        _submit(slurm, Path(place), options.jobs)
        for kind in ("array", "jobs"):
            runs = ["--runs-dir", str(Path(place) / kind)]
            run = ["sweep-0001"] if kind == "array" else ["all"]
            contenders[f"`hpcinit status`, {kind}"] = ([*STATUS, *runs, *run], Path(place))
            contenders[f"`hpcinit status --json`, {kind}"] = ([*STATUS, *runs, *run, "--json"], Path(place))
        contenders["start-up"] = ([*STATUS, "--runs-dir", f"{place}/local"], Path(place))
        contenders["`squeue`"] = (SQUEUE, Path(place))
        contenders["`squeue` with hpcinit's columns"] = ([*SQUEUE, f"--format={FORMAT}"], Path(place))
        print(_report(_measure(contenders, env, options.rounds), options.rounds, slurm.version()))
    return 0


def _submit(slurm: MiniSlurm, place: Path, jobs: int) -> None:
    """Submit an array and the same number of jobs, with the run folders that hpcinit writes."""
    slurm.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    script = place / "job.sh"
    script.write_text("#!/bin/sh\n")
    sbatch = ["sbatch", "--parsable", "--chdir=/", "--output=/dev/null"]
    array = slurm.run(*sbatch, f"--array=0-{jobs - 1}", str(script)).strip()
    sweep = place / "array/sweep-0001"
    plans = [
        Spec("one", "mini", 1, 1, Program("script", "train.py", ("--lr", f"{number}e-3")), str(place), nonce="0" * 32)
        for number in range(jobs)
    ]
    about = {"engine": "slurm", "submitted": time.time(), "command": sbatch}
    for number, plan in enumerate(plans):
        (sweep / str(number)).mkdir(parents=True)
        record = {"job_id": f"{array}_{number}", **about, "program": plan.command()}
        (sweep / f"{number}/submission.json").write_text(json.dumps(record))
        (sweep / f"{number}/spec.json").write_text(plan.to_json())
    (sweep / "sweep.json").write_text(json.dumps({"tasks": {str(n): f"seed={n}" for n in range(jobs)}}))
    record = {"job_id": array, "engine": "slurm", "sweep": [{"job_id": array, "tasks": f"0-{jobs - 1}"}]}
    (sweep / "submission.json").write_text(json.dumps(record))
    for plan in plans:
        job_id = slurm.run(*sbatch, str(script)).strip()
        run = folder.claim(place / "jobs", "one")
        (run / "spec.json").write_text(plan.to_json())
        folder.mark_submitted(run, {"job_id": job_id, **about, "program": plan.command()})
    local = folder.claim(place / "local", "one")
    folder.mark_submitted(local, {"job_id": "1", "engine": "local"})
    (local / "local.json").write_text(json.dumps({"state": "COMPLETED", "exit_status": 0}))


def _measure(
    contenders: Mapping[str, tuple[list[str], Path]], env: Mapping[str, str], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Wall seconds, and CPU seconds including those of squeue."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, (command, workdir) in contenders.items():
            began, cpu = time.perf_counter(), _children_cpu_s()
            subprocess.run(command, cwd=workdir, env=env, stdout=subprocess.DEVNULL, check=True)
            if number:
                seconds[name].append((time.perf_counter() - began, _children_cpu_s() - cpu))
    return seconds


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _report(seconds: Mapping[str, Sequence[tuple[float, float]]], rounds: int, version: str) -> str:
    lines = [
        f"Slurm {version}, {os.cpu_count()} cores, {rounds} rounds, load average at the end {os.getloadavg()[0]:.1f}",
        "",
        "| | median ms | min | max | CPU ms | less start-up, x `squeue` | the same of the minima | of CPU ms |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    measures = {name: _measures(values) for name, values in seconds.items()}
    squeue, start = measures["`squeue`"], measures["start-up"]
    for name, mine in measures.items():
        ratios = [(mine[at] - start[at]) / squeue[at] for at in (0, 1, 3)] if "hpcinit" in name else []
        numbers = (
            [f"{1000 * value:.0f}" for value in mine] + [f"{ratio:.2f}" for ratio in ratios] + [""] * (3 - len(ratios))
        )
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def _measures(values: Sequence[tuple[float, float]]) -> tuple[float, float, float, float]:
    """Return median, minimum and maximum of the wall time, and the median CPU time."""
    wall = [clock for clock, _ in values]
    return median(wall), min(wall), max(wall), median(cpu for _, cpu in values)


if __name__ == "__main__":
    sys.exit(main())
