"""How long does `hpcinit report --since 30d` take for 1,000 runs?

    python -m benchmarks.ledger [--runs 1000] [--lines 1000] [--rounds 1]

It makes run folders of 2 nodes with 4 ranks each: with today's record of rank 0 (200 spans, which is the maximum), and
without it, as older versions left them, where only the log and the checkpoints show the steps. Half of the logs have
times. Each has 100 lines that are about no step. It measures whole processes, without Slurm."""

from __future__ import annotations

import argparse
import json
import os
import random
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

LINES = (
    "{time} INFO trainer.py:212 step {step}/{total} loss {loss:.4f} grad_norm 1.234 lr 3.000e-04 tokens/s 123,456\n",
    "step {step} | loss {loss:.4f} | grad norm 1.234 | lr 3.000e-04 | time 1000.1 ms | 123,456 tokens/s\n",
)
WORDS = ("NCCL version", "compiled", "model", "warning", "dataset", "tokenizer", "config")
START_UP_S, STEP_S, SAVE_S, SAVE_EVERY = 30, 1.0, 5.0, 100


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=1000, help="lines of each log, one per step of 1 s")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    print(f"{options.runs} runs, {options.lines} lines, {os.cpu_count()} cores, load average before {load:.1f}")
    for kind in ("current", "older"):
        with tempfile.TemporaryDirectory() as place:
            for number in range(options.runs):
                _make(Path(place) / f"train-{number:04d}", kind == "current", options.lines, number)
            command = [sys.executable, "-m", "hpcinit", "report", "--since", "30d", "--runs-dir", place]
            took: list[float] = []
            used: list[float] = []
            for _ in range(options.rounds):
                began, cpu = time.perf_counter(), _children_cpu_s()
                subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
                took.append(time.perf_counter() - began)
                used.append(_children_cpu_s() - cpu)
        shown = f"{min(took):.2f} to {max(took):.2f} s, CPU time {statistics.median(used):.2f} s"
        print(f"{kind}: median {statistics.median(took):.2f} s of {len(took)}, {shown}, load {os.getloadavg()[0]:.1f}")
    return 0


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _make(folder: Path, current: bool, lines: int, number: int) -> None:
    run = synthetic.run(folder, nodes=2, per_node=4)
    begin = synthetic.START + START_UP_S
    end = begin + lines * STEP_S + lines // SAVE_EVERY * SAVE_S + 20
    (run / "exit.json").write_text(json.dumps({"job": "43", "restart": 0, "ended": end, "exit_status": 1}))
    at = begin
    with (run / run_folder.RANK_LOG.format(rank=0)).open("w") as log:
        log.writelines(f"{WORDS[at % 7]}: {'x' * at} {at if at % 2 else ''}\n" for at in range(100))
        for step in range(1, lines + 1):
            at += STEP_S + random.uniform(-0.05, 0.05)
            now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
            log.write(LINES[number % 2].format(time=now, step=step, total=2 * lines, loss=10 / step))
            if step % SAVE_EVERY == 0:
                at += SAVE_S
                saved = run / f"checkpoints/step-{step}/rank-0.pt"
                log.write(f"saved checkpoint {saved}\n")
                saved.parent.mkdir(parents=True)
                saved.touch()
                os.utime(saved, (at,) * 2)
    if current:
        record = SpanRecord(begin)
        record.step(1, begin + STEP_S)
        for step in range(2, lines + 1):
            record.step(step, begin + step * STEP_S)
            if step % (max(2, lines // training_spans.MOST)) == 0:
                record.switch(training_spans.SAVING, begin + step * STEP_S)
                record.switch(training_spans.STEPS, begin + (step + 0.2) * STEP_S)
        (run / run_folder.TIMELINE / "43.0.0" / training_spans.FILE).write_text(record.to_json())


if __name__ == "__main__":
    sys.exit(main())
