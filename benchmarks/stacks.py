"""How long does folding the stacks of many ranks take, from the text of the nodes to the lines of `hpcinit stacks`?

    python -m benchmarks.stacks [--ranks 512] [--rounds 7]

The ranks are simulated: 8 per node, 30 frames each in three samples; 3 ranks differ, and a tenth of the ranks move."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from hpcinit.observe import stack_collector, stacks

PER_NODE, FRAMES, SAMPLES = 8, 30, 3
ODD = (37, 81, 400)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    printed = [line for node in range(options.ranks // PER_NODE) for line in stack_collector.encoded(_report(node))]
    taken = []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        reports = stacks.decoded(printed)
        groups = stacks.fold(stacks.rank_stack(one, report["host"]) for report in reports for one in report["ranks"])
        shown = list(stacks.lines(groups, [], []))
        taken.append(time.perf_counter() - begin)
    size = sum(map(len, printed)) / 1024
    print(f"{options.ranks} ranks: {len(groups)} groups, {len(shown)} lines, {size:.0f} KiB from the nodes")
    print(f"folding takes {1000 * median(taken):.0f} ms, at most {1000 * max(taken):.0f} ms")
    return 0


def _report(node: int) -> dict[str, Any]:
    return {"host": f"n{node:03}", "ranks": [_rank(node * PER_NODE + local) for local in range(PER_NODE)]}


def _rank(rank: int) -> dict[str, Any]:
    def frames(sample: int) -> list[list[Any]]:
        line = 91 + (rank in ODD) + (sample if rank % 10 == 0 else 0)
        return [["/env/site-packages/torch/module.py", line, "call"]] + [
            [f"/env/site-packages/torch/file_{at}.py", 100 + at, f"function_{at}"] for at in range(FRAMES)
        ]

    samples = [{"state": "S", "wchan": "futex_wait", "frames": frames(sample)} for sample in range(SAMPLES)]
    own = {"rank": rank, "pid": 1000 + rank, "title": "", "python": True, "elapsed_s": 0.9, "cpu_s": 0.1}
    return {**own, "gil_kept": False, "error": "", "samples": samples}


if __name__ == "__main__":
    raise SystemExit(main())
