"""Measure one import of torch for each given Python: seconds, memory, and size on disk.

    python -m benchmarks.imports .venv/bin/python .venv/torch-2.14.1/bin/python

launch=fork pays it once per node and srun once per rank. The page cache is warm: the first import does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

CODE = """
import json, os, resource, sys, time
start = time.perf_counter()
import torch
took = time.perf_counter() - start
try:
    import numpy
except ImportError:
    pass
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([torch.__version__, took, peak, len(names) - 1, os.path.dirname(torch.__file__)]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    print("| torch | import, s: median (least to most) | peak memory, MiB | other threads | on disk, GB |")
    print("|---|---|---|---|---|")
    for python in given.pythons:
        print(row(python, given.times))


def row(python: str, times: int) -> str:
    found = [once(python) for _ in range(times + 1)][1:]
    version, _, peak, threads, folder = found[-1]
    took = [one[1] for one in found]
    least, most = min(took), max(took)
    return (
        f"| {version} | {statistics.median(took):.2f} ({least:.2f} to {most:.2f}) | {peak:.0f} | {threads} | "
        f"{on_disk(Path(folder)):.1f} |"
    )


def once(python: str) -> list:  # type: ignore[type-arg]
    done = subprocess.run([python, "-c", CODE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def on_disk(torch: Path) -> float:
    """Return the gigabytes of torch and of the packages nvidia and triton, which its CUDA build needs."""
    folders = [torch, torch.parent / "nvidia", torch.parent / "triton"]
    files = (path for folder in folders if folder.is_dir() for path in folder.rglob("*") if path.is_file())
    return sum(path.lstat().st_size for path in files) / 1e9


if __name__ == "__main__":
    main()
