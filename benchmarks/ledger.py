"""How long does `hpcinit report --since 30d` take for 1,000 runs?

    python -m benchmarks.ledger [--runs 1000] [--steps 1000] [--rounds 1]

It makes run folders of 2 nodes with 4 ranks each, in which rank 0 recorded 200 spans, which is the maximum. It measures
whole processes, without Slurm."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hpcinit.records import run_folder, training_spans
from hpcinit.records.training_spans import SpanRecord
from tests.observe import synthetic

START_UP_S = 30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000, help="training steps of each run, of 1 s")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    print(f"{options.runs} runs, {options.steps} steps, {os.cpu_count()} cores, load average before {load:.1f}")
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.runs):
            _make(Path(place) / f"train-{number:04d}", options.steps)
        command = [sys.executable, "-m", "hpcinit", "report", "--since", "30d", "--runs-dir", place]
        took: list[float] = []
        used: list[float] = []
        for _ in range(options.rounds):
            began, cpu = time.perf_counter(), _children_cpu_s()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            took.append(time.perf_counter() - began)
            used.append(_children_cpu_s() - cpu)
    shown = f"{min(took):.2f} to {max(took):.2f} s, CPU time {statistics.median(used):.2f} s"
    print(f"median {statistics.median(took):.2f} s of {len(took)}, {shown}, load {os.getloadavg()[0]:.1f}")
    return 0


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _make(folder: Path, steps: int) -> None:
    run = synthetic.run(folder, nodes=2, per_node=4)
    begin = synthetic.START + START_UP_S
    (run / "exit.json").write_text(
        json.dumps({"job": "43", "restart": 0, "ended": begin + steps + 20, "exit_status": 1})
    )
    record = SpanRecord(begin)
    record.step(1, begin + 1)
    for step in range(2, steps + 1):
        record.step(step, begin + step)
        if step % (max(2, steps // training_spans.MOST)) == 0:
            record.switch(training_spans.SAVING, begin + step)
            record.switch(training_spans.STEPS, begin + step + 0.2)
    (run / run_folder.TIMELINE / "43.0.0" / training_spans.FILE).write_text(record.to_json())


if __name__ == "__main__":
    sys.exit(main())
