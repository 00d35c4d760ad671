"""How long does a job step take until the end of its first all-reduce, for each way to start ranks?

    python -m benchmarks.launch [--ranks 1 2 4 8 16 32] [--nodes 1 4] [--rounds 5] [--cold] [--slow-ms 1] [--out FOLDER]
                                [--go-on]

It uses the real Slurm of the tests, whose nodes are namespaces of this machine (root). Measured: from the call of srun
in an existing allocation to the return of the first all-reduce on the last rank (gloo). Not measured: the queue and the
end of the job. Each round runs every way once, in random order. One round of the first shape before all does not count.

--cold drops the kernel's file cache before each start. --slow-ms delays every open and stat
(benchmarks/launching/slow_files.c), as a loaded parallel file system does. The calls are always counted.

Memory is the sum over a node of the memory of its ranks and their parent process (Pss of /proc/PID/smaps_rollup) after
the all-reduce. Shared memory is what a rank shares with other processes; the rest is its own (medians of the ranks).

It writes FOLDER/launch.md, launch.json, and launch.svg if matplotlib is installed (pip install -e '.[bench]') after
each shape. With --go-on, the shapes in launch.json are not measured again.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.launching import slow_files
from hpcinit.config.compose import compose
from hpcinit.submit import srun_step
from hpcinit.submit.job_environment import make_spec
from hpcinit.submit.run_path import RunPath
from tests.minislurm import MiniSlurm

ROOT = Path(__file__).parent.parent
BARE, OURS = ROOT / "benchmarks/launching/bare.py", ROOT / "benchmarks/launching/ours.py"
LIMIT_S = 600


@dataclass(frozen=True)
class Shape:
    nodes: int
    ranks: int  # per node

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


@dataclass(frozen=True)
class Place:
    """One start: the folder for its results, the Python of the ranks, and an unused port."""

    shape: Shape
    folder: Path
    python: Path
    port: int


def _hpcinit(kind: str) -> Callable[[Place], str]:
    def command(place: Place) -> str:
        overrides = [
            "cluster=mini",
            f"launch={kind}",
            f"nodes={place.shape.nodes}",
            f"ranks_per_node={place.shape.ranks}",
            "cluster.gpus_per_node=0",
            "cluster.cpus_per_node=null",
            "cluster.partitions={}",
            "job=program",
            f"job.script={OURS}",
            f"cluster.python={place.python}",
            "+cluster.srun.overcommit=true",
        ]
        config = compose(overrides)
        for below in ("logs", "errors"):
            (place.folder / below).mkdir()
        (place.folder / "spec.json").write_text(make_spec(config, ROOT).to_json())
        return srun_step.srun_step_line(config, RunPath(place.folder), ROOT)

    return command


def _srun(place: Place, tasks: int, command: str) -> str:
    log = shlex.quote(str(place.folder / "log-%t"))
    return (
        f"srun --nodes={place.shape.nodes} --ntasks={tasks * place.shape.nodes} --ntasks-per-node={tasks} --overcommit "
        f"--kill-on-bad-exit=1 --output={log} {command}"
    )


def bare_srun(place: Place) -> str:
    return _srun(place, place.shape.ranks, f"{place.python} {BARE}")


def bare_torchrun(place: Place) -> str:
    options = f"--nnodes={place.shape.nodes} --nproc-per-node={place.shape.ranks} --rdzv-backend=c10d"
    return _srun(
        place,
        1,
        f"{place.python} -m torch.distributed.run {options} --rdzv-endpoint=n1:{place.port} --rdzv-id=b {BARE}",
    )


def accelerate(place: Place) -> str:
    """Return the command as with GPUs, because --cpu starts only one process."""
    several = "--multi_gpu " * (place.shape.world > 1)  # accelerate refuses it for one process
    options = (
        f"{several}--num_machines={place.shape.nodes} --num_processes={place.shape.world} --mixed_precision=no "
        f"--dynamo_backend=no --main_process_ip=n1 --main_process_port={place.port} --machine_rank=$SLURM_NODEID"
    )
    inner = f"ACCELERATE_USE_CPU=true {place.python} -m accelerate.commands.accelerate_cli launch {options} {BARE}"
    return _srun(place, 1, f"bash -c {shlex.quote(inner)}")


def deepspeed(place: Place) -> str:
    """Return the command that `deepspeed` runs on each node, without ssh or pdsh."""
    info = json.dumps({f"n{node + 1}": list(range(place.shape.ranks)) for node in range(place.shape.nodes)})
    encoded = __import__("base64").urlsafe_b64encode(info.encode()).decode()
    inner = (
        f"{place.python} -m deepspeed.launcher.launch --world_info={encoded} --node_rank=$SLURM_NODEID "
        f"--master_addr=n1 --master_port={place.port} {BARE}"
    )
    return _srun(place, 1, f"bash -c {shlex.quote(inner)}")


WAYS: dict[str, Callable[[Place], str]] = {
    "launch=fork": _hpcinit("fork"),
    "launch=srun": _hpcinit("srun"),
    "launch=torchrun": _hpcinit("torchrun"),
    "srun": bare_srun,
    "torchrun": bare_torchrun,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
}


def available() -> list[str]:
    needs = {"launch=torchrun": "hpcinit.elastic", "accelerate": "accelerate", "deepspeed": "deepspeed"}
    return [way for way in WAYS if way not in needs or importlib.util.find_spec(needs[way])]


class Bench:
    def __init__(self, slurm: MiniSlurm, folder: Path, slow_ms: float, cold: bool) -> None:
        self.slurm, self.folder, self.cold, self.starts = slurm, folder, cold, 0
        shim = slow_files.build(folder)
        self.python = folder / "python"
        self.python.write_text(
            f"#!/bin/sh\nexec env LD_PRELOAD={shim} SLOW_FILES_US={int(1000 * slow_ms)} "
            f'SLOW_FILES_COUNT="$BENCH_OUT/count-$SLURMD_NODENAME" {sys.executable} "$@"\n'
        )
        self.python.chmod(0o755)
        self.job = ""

    @contextmanager
    def allocation(self, shape: Shape) -> Iterator[None]:
        """Allocate the nodes of `shape` for the steps in the block."""
        options = [
            f"--nodes={shape.nodes}",
            "--exclusive",
            "--job-name=bench",
            "--time=60",
        ]  # the time limit of the partition
        self.slurm.run("salloc", "--no-shell", *options)
        self.job = self.slurm.run("squeue", "--noheader", "--name=bench", "--state=RUNNING", "--format=%i").split()[-1]
        yield
        self.slurm.cancel_all()

    def start(self, way: str, shape: Shape) -> dict[str, float]:
        """Return the seconds, memory in MB, and file system calls per node, of one start."""
        self.starts += 1
        place = Place(shape, self.folder / f"{self.starts:04d}", self.python, 20000 + self.starts)
        place.folder.mkdir()
        for node in self.slurm.nodes:
            slow_files.start_count(place.folder / f"count-{node}")
        command = WAYS[way](place)
        if self.cold:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        env = {**os.environ, **self.slurm.env, "SLURM_JOB_ID": self.job, "BENCH_OUT": str(place.folder)}
        env |= {"BENCH_ADDR": "n1", "BENCH_PORT": str(place.port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        begin = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        found = [json.loads(path.read_text()) for path in place.folder.glob("*.json") if path.stem.isdigit()]
        if done.returncode or len(found) != shape.world:
            logs = (*place.folder.glob("log-*"), *place.folder.glob("logs/*"))
            output = "".join(path.read_text()[-2000:] for path in logs)[-4000:]
            raise SystemExit(
                f"benchmarks.launch: {way}, {shape}: status {done.returncode}, {len(found)} ranks\n{command}\n"
                f"{done.stderr[-2000:]}{output}"
            )
        counts = [slow_files.counted(path) for path in place.folder.glob("count-*")]
        ranks = [one["memory"][0] for one in found]
        return {
            "seconds": max(one["at"] for one in found) - begin,
            "mb": sum(each["Pss"] for one in found for each in one["memory"]) / 1024 / shape.nodes,
            "shared": median(one["Shared_Clean"] + one["Shared_Dirty"] for one in ranks) / 1024,
            "own": median(one["Private_Clean"] + one["Private_Dirty"] for one in ranks) / 1024,
            "opens": sum(opens for opens, _ in counts) / shape.nodes,
            "stats": sum(stats for _, stats in counts) / shape.nodes,
        }


Took = dict[str, list[dict[str, float]]]
IMPORT = "import torch"  # not a way to start ranks: the least that each of them needs


def measure(bench: Bench, shape: Shape, ways: Sequence[str], rounds: int) -> Took:
    took: Took = {way: [] for way in (*ways, IMPORT)}
    for number in range(1 if bench.starts else 0, rounds + 1):
        with bench.allocation(shape):
            for way in random.sample(list(ways), len(ways)):
                one = bench.start(way, shape)
                if number:  # round 0, of the first shape, fills the caches
                    took[way].append(one)
            took[IMPORT].append({"seconds": _import_s()})
        print(f"{shape.nodes} x {shape.ranks}: round {number} of {rounds}", file=sys.stderr, flush=True)
    return took


def _import_s() -> float:
    """Return the seconds from the start of a Python to the end of its import of torch, without Slurm."""
    begin = time.monotonic()
    program = "import time, torch, torch.distributed; print(time.monotonic())"
    return float(subprocess.check_output([sys.executable, "-c", program])) - begin


# --- the table and the plot


def _ways(by_shape: Mapping[Shape, Took]) -> list[str]:
    return [way for way in WAYS if any(way in took for took in by_shape.values())]


def table(key: str, head: str, digits: int, by_shape: Mapping[Shape, Took], base: str) -> str:
    """Return a table of medians, with the range of the seconds and the ratio to the base."""
    ways = _ways(by_shape)
    lines = [f"| nodes x ranks | {' | '.join(f'{way}, {head}' for way in ways)} |", "|--:|" + "--:|" * len(ways)]
    for shape, took in by_shape.items():
        cells = []
        for way in ways:
            values = [one[key] for one in took.get(way, ())]
            if not values:
                cells.append("")
                continue
            spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if key == "seconds" else ""
            times = median(values) / median([one[key] for one in took[base]]) if base in took else 1
            cells.append(f"{median(values):,.{digits}f}{spread}" + (f", {times:.1f}x" if way != base else ""))
        lines.append(f"| {shape.nodes} x {shape.ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(by_shape: Mapping[Shape, Took], path: Path) -> None:
    import matplotlib  # noqa: PLC0415 - optional

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    counts = sorted({shape.nodes for shape in by_shape})
    figure, axes = pyplot.subplots(1, len(counts), figsize=(6 * len(counts), 4.5), squeeze=False, sharey=True)
    for axis, nodes in zip(axes[0], counts, strict=True):
        shapes = [shape for shape in by_shape if shape.nodes == nodes]
        for way in _ways(by_shape):
            of = [shape for shape in shapes if way in by_shape[shape]]
            seconds = [median([one["seconds"] for one in by_shape[shape][way]]) for shape in of]
            axis.plot([shape.world for shape in of], seconds, marker="o", label=way)
        axis.set(xscale="log", yscale="log", xlabel="ranks", title=f"{nodes} node{'s' * (nodes > 1)}")
        axis.set_xticks([shape.world for shape in shapes], [str(shape.world) for shape in shapes])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("s to the end of the first all-reduce")
    axes[0][0].legend(loc="upper left")  # where there are no lines
    figure.tight_layout()
    figure.savefig(path)


def report(by_shape: Mapping[Shape, Took], about: str, out: Path) -> str:
    ways = _ways(by_shape)
    base = "launch=fork" if "launch=fork" in ways else ways[0]
    columns = (
        ("seconds", "s", 2), ("mb", "MB per node", 0), ("shared", "MB per rank, shared", 0),
        ("own", "MB per rank, own", 0), ("opens", "opens per node", 0), ("stats", "stats per node", 0),
    )  # fmt: skip
    imports = [one["seconds"] for took in by_shape.values() for one in took.get(IMPORT, ())]
    if imports:
        about += f"; one import of torch: {median(imports):.2f} s ({min(imports):.2f} to {max(imports):.2f})"
    parts = [about, *(table(*column, by_shape, base) for column in columns)]
    text = "\n\n".join(parts) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "launch.md").write_text(text)
    document: list[dict[str, Any]] = [
        {"nodes": shape.nodes, "ranks": shape.ranks, "took": took} for shape, took in by_shape.items()
    ]
    (out / "launch.json").write_text(json.dumps({"about": about, "shapes": document}) + "\n")
    if importlib.util.find_spec("matplotlib"):
        plot(by_shape, out / "launch.svg")
    return text


def earlier(out: Path) -> dict[Shape, Took]:
    """Return what an earlier run wrote to `out`."""
    try:
        document = json.loads((out / "launch.json").read_text())
    except FileNotFoundError:
        return {}
    return {Shape(one["nodes"], one["ranks"]): one["took"] for one in document["shapes"]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="ranks of the whole job")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: 5)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=available())
    parser.add_argument("--cold", action="store_true", help="without the file cache")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="delay of each metadata call")
    parser.add_argument("--go-on", action="store_true", help="keep what FOLDER/launch.json has, and measure the rest")
    parser.add_argument("--out", type=Path, default=Path("build/launch"))
    options = parser.parse_args(arguments)
    shapes = [Shape(n, ranks // n) for n in options.nodes for ranks in options.ranks if ranks >= n and ranks % n == 0]
    load = os.getloadavg()[0]
    about = (
        f"{datetime.date.today()}, {os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}, "
        f"torch {version('torch')}; medians of {options.rounds}, {'cold' if options.cold else 'warm'} file cache"
        + (f", {options.slow_ms:g} ms per metadata call" if options.slow_ms else "")
        + f"; load average before {load:.1f}"
    )
    by_shape = earlier(options.out) if options.go_on else {}
    folder = options.out.absolute() / f"starts-{os.getpid()}"
    folder.mkdir(parents=True)
    with MiniSlurm(nodes=max(options.nodes), gpus=0, name=f"bench-{os.getpid()}") as slurm:
        bench = Bench(slurm, folder, options.slow_ms, options.cold)
        for shape in shapes:
            if shape not in by_shape:
                by_shape[shape] = measure(bench, shape, options.ways, options.rounds)
                report(by_shape, about, options.out)  # so that an interruption loses only one shape
    print(report(by_shape, about, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
