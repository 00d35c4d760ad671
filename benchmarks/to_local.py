"""What does launch.env_to_local cost, and what does it save, where every metadata call takes a millisecond?

    python -m benchmarks.to_local --python VENV/bin/python [--nodes 1] [--ranks 8] [--rounds 3] [--slow-ms 1]
                                  [--out FOLDER]

Whole jobs of `hpcinit submit` on the real Slurm of the tests (root), whose nodes' own disk is /dev/shm: a tmpfs of
each. All else is slow (benchmarks/launching/slow_files.c); --quick names what is not, as Python itself
where it is installed on every node. Inside the clock: from the batch script's set-up, so sbcast and unpacking too, to
the return of the first all-reduce on the last rank (gloo). Each round runs every way once, in random order. The first
submission packs into FOLDER, with slow files as well, unless it has been packed there before; tar, which unpacks, sees
the node's disk only and is not slow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.launching import slow_files
from tests.minislurm import MiniSlurm

ROOT = Path(__file__).parent.parent
WAYS = [(launch, local) for launch in ("srun", "fork") for local in (False, True)]
SENT = re.compile(r"env_to_local: (\d+) MB .* in (\d+) s, (\d+) of them until all was sent")


class Bench:
    def __init__(self, slurm: MiniSlurm, options: argparse.Namespace) -> None:
        self.slurm, self.options, self.out = slurm, options, options.out.absolute() / f"to-local-{os.getpid()}"
        self.out.mkdir(parents=True)
        self.starts = 0
        self.slow = {"SLOW_FILES_US": str(int(1000 * options.slow_ms)), "LD_PRELOAD": str(slow_files.build(self.out))}
        self.slow |= {"SLOW_FILES_QUICK": str(options.quick)} if options.quick else {}

    def submit(self, *words: str, slow: bool = False) -> str:
        """What it said."""
        env = {**os.environ, **self.slurm.env, **(self.slow if slow else {}), "PYTHONPATH": str(ROOT)}
        site = {
            "partitions": "{}",
            "gpus_per_node": 0,
            "cpus_per_node": "null",
            "local_disk": "/dev/shm",
            "cache": self.out.parent,
        }
        keys = [f"cluster.{key}={value}" for key, value in site.items()]
        keys += ["+cluster.srun.overcommit=true", "job=program", f"ranks_per_node={self.options.ranks}"]
        keys += [f"nodes={self.options.nodes}", "wait=true"]
        command = [self.options.python.absolute(), "-m", "hpcinit", "submit", "cluster=mini", *keys, *words]
        done = subprocess.run(command, cwd=self.out, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"benchmarks.to_local: {' '.join(words)}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def pack(self) -> None:
        begin = time.monotonic()
        said = self.submit("launch.env_to_local=true", "job.command=hostname", "again=true", slow=True)
        print(f"first submission and its job: {time.monotonic() - begin:.0f} s")
        print("".join(line for line in said.splitlines(keepends=True) if "pack" in line), flush=True)

    def start(self, launch: str, local: bool) -> dict[str, float]:
        """Seconds until all ranks were through, what it was sent and unpacked in, and metadata calls."""
        self.starts += 1
        out = self.out / f"{self.starts:03d}"
        out.mkdir()
        slow_files.start_count(out / "count")
        env = {**self.slow, "SLOW_FILES_COUNT": str(out / "count"), "BENCH_OUT": str(out), "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = str(ROOT)
        ours = ROOT / "benchmarks/launching/ours.py"
        # The variables last: what is before is no work of the ranks', and cheap.
        begin = f"read -r now _ < /proc/uptime; echo $now > {out}/begin"
        words = [*(f"+job.env.{name}={value}" for name, value in env.items()), f"cluster.setup=['{begin}']"]
        self.submit(
            f"launch={launch}", f"launch.env_to_local={local}".lower(), f"job.script={ours}", f"runs_dir={out}", *words
        )
        ranks = [json.loads(path.read_text())["at"] for path in out.glob("*.json")]
        sent = SENT.search(next(out.glob("*/logs/job.log")).read_text())
        return {
            "seconds": max(ranks) - float((out / "begin").read_text()),
            "before": float(sent[2]) if sent else 0.0,
            "sbcast": float(sent[3]) if sent else 0.0,
            "calls": sum(slow_files.counted(out / "count")) / self.options.nodes,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.to_local", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="of the environment")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8, help="of a node (default: 8)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow-ms", type=float, default=1.0)
    parser.add_argument("--quick", type=Path, help="a folder that is on the nodes' own disks anyway")
    parser.add_argument("--out", type=Path, default=Path("build/to_local"))
    options = parser.parse_args(arguments)
    took: dict[tuple[str, bool], list[dict[str, float]]] = {way: [] for way in WAYS}
    with MiniSlurm(nodes=options.nodes, gpus=0, name=f"bench-{os.getpid()}") as slurm:
        bench = Bench(slurm, options)
        bench.pack()
        for number in range(options.rounds):
            for way in random.sample(WAYS, len(WAYS)):
                took[way].append(bench.start(*way))
            print(f"round {number + 1} of {options.rounds}, load average {os.getloadavg()[0]:.1f}", flush=True)
    heads = ("launch", "env_to_local", "s to the first all-reduce", "of them before the ranks", "until sent")
    print(f"| {' | '.join(heads)} | slow calls of a node |")
    print("|---|---|--:|--:|--:|--:|")
    for (launch, local), found in took.items():
        seconds = [one["seconds"] for one in found]
        spread = f"{median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        rest = " | ".join(f"{median(one[key] for one in found):,.0f}" for key in ("before", "sbcast", "calls"))
        print(f"| {launch} | {str(local).lower()} | {spread} | {rest} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
