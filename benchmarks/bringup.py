"""How much longer does `hpcinit.init()` take than a bare `init_process_group`?

    python -m benchmarks.bringup [--ranks 8 16 32] [--rounds 9] [--whole 3]

One node, loopback, gloo. The ranks start once and import everything. Every round runs each program once, in random
order; the first round does not count. Measured: from an agreed time, until which every rank sleeps, to the return of
the call on the last rank. Not measured: the start of Python, imports, and destroying the group. The bare program calls
`init_process_group("gloo")` with `env://`, as a script for torchrun does. init creates the same group, and also runs
the rendezvous, waits for all ranks, sets seeds and builds the device mesh.

--whole measures whole processes, from the start of the first to the end of the last.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from statistics import median

BARE, BARRIER, INIT = "bare init_process_group", "the same and a barrier", "hpcinit.init"
AHEAD_S = 0.5  # a round is announced this long before it starts


def rank() -> None:
    """Read one program per line, run it, and print the time of its end."""
    import torch.distributed as dist  # noqa: PLC0415 - only the ranks need torch

    import hpcinit  # noqa: PLC0415

    ways = _ways()
    print("ready", flush=True)
    for line in sys.stdin:
        way, port, start = json.loads(line)
        os.environ["MASTER_PORT"] = str(port)
        time.sleep(max(0.0, start - time.monotonic()))
        ways[way]()
        print(time.monotonic(), flush=True)
        sys.stdin.readline()  # all ranks are done
        if way == INIT:
            hpcinit.shutdown()
        else:
            dist.destroy_process_group()
        print("down", flush=True)


def _ways() -> dict[str, Callable[[], object]]:
    import torch.distributed as dist  # noqa: PLC0415

    import hpcinit  # noqa: PLC0415

    def bare() -> None:
        dist.init_process_group("gloo")

    def barrier() -> None:
        bare()
        dist.barrier()

    return {BARE: bare, BARRIER: barrier, INIT: hpcinit.init}


def once(way: str) -> None:
    """Run a whole program: create the process group and destroy it."""
    import torch.distributed as dist  # noqa: PLC0415

    _ways()[way]()
    if dist.is_initialized() and way != INIT:
        dist.destroy_process_group()


@contextmanager
def _ranks(count: int, arguments: Sequence[str], port: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        started = []
        for number in range(count):
            env = {**os.environ, **_environment(number, count, port)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.bringup", *arguments], env=env, text=True, **pipes
            )  # type: ignore[call-overload]
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield started


def _environment(rank: int, count: int, port: int) -> Mapping[str, str]:
    """Return the variables that a launcher sets; HPCINIT_STARTED_BY=env uses them unchanged."""
    world = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    fixed = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    fixed["HPCINIT_STARTED_BY"] = "env"
    return {name: str(value) for name, value in world.items()} | fixed


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _answers(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    lines = [process.stdout.readline().strip() for process in ranks if process.stdout]
    if not all(lines):
        raise SystemExit(f"benchmarks.bringup: rank {lines.index('')} ended; run it alone to see why")
    return lines


def _send(ranks: Sequence[subprocess.Popen[str]], line: str) -> None:
    for process in ranks:
        if process.stdin:
            process.stdin.write(line + "\n")
            process.stdin.flush()


def measure(count: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each counted round, by program."""
    took: dict[str, list[float]] = {BARE: [], BARRIER: [], INIT: []}
    with _ranks(count, ["--rank"]) as ranks:
        _answers(ranks)
        for number in range(rounds + 1):
            for way in random.sample(list(took), len(took)):
                start = time.monotonic() + AHEAD_S
                _send(ranks, json.dumps([way, _free_port(), start]))
                seconds = max(map(float, _answers(ranks))) - start
                _send(ranks, "")
                _answers(ranks)
                if number:
                    took[way].append(seconds)
    return took


def whole(count: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds from the start of the first process to the end of the last, by program."""
    took: dict[str, list[float]] = {BARE: [], INIT: []}
    for _ in range(rounds):
        for way, seconds in took.items():
            start = time.monotonic()
            with _ranks(count, ["--once", way], _free_port()) as ranks:
                failed = [number for number, process in enumerate(ranks) if process.wait()]
            if failed:
                raise SystemExit(f"benchmarks.bringup: {way}: ranks {failed} failed")
            seconds.append(time.monotonic() - start)
    return took


def table(head: str, by_count: Mapping[int, Mapping[str, Sequence[float]]], scale: int, digits: int) -> str:
    """Return a table with median (min to max) and the ratios of the medians."""
    ways = list(next(iter(by_count.values())))
    others = [way for way in ways if way != INIT]
    lines = [f"| ranks | {' | '.join([*(f'{way}, {head}' for way in ways), *(f'init / {way}' for way in others)])} |"]
    lines.append("|--:|" + "--:|" * (len(ways) + len(others)))
    for count, took in by_count.items():
        cells = [
            f"{scale * median(took[way]):,.{digits}f} ({scale * min(took[way]):,.{digits}f} to "
            f"{scale * max(took[way]):,.{digits}f})"
            for way in ways
        ]
        cells += [f"{median(took[INIT]) / median(took[way]):.2f}" for way in others]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bringup", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds (default: 9)")
    parser.add_argument("--whole", type=int, default=0, help="rounds of whole processes, for a second table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        rank()
        return 0
    if options.once:
        once(options.once)
        return 0
    load = os.getloadavg()[0]
    called = {count: measure(count, options.rounds) for count in options.ranks}
    machine = (
        f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}, torch {version('torch')}"
    )
    print(f"{datetime.date.today()}, {machine}; medians of {options.rounds}; load average before {load:.1f}\n")
    print(table("ms", called, 1000, 0))
    if options.whole:
        print("\n" + table("whole processes, s", {n: whole(n, options.whole) for n in options.ranks}, 1, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
