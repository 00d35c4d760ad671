"""Compare the speed of `expand` and `first` with ClusterShell, python-hostlist and scontrol.

    pip install ClusterShell python-hostlist
    python benchmarks/nodelist.py

Run it manually. It prints two Markdown tables with medians. Missing programs are named. The time of scontrol includes
the start of its process and reading its output, as in a program that calls it.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from hpcinit.nodelist import expand, first

REPEATS = 9
# scontrol refuses more than 65,536 hosts in one range, so 100,000 hosts are two ranges.
SHAPES = {
    "one range": ["n[001-100]", "n[00001-10000]", "n[000001-050000,050001-100000]"],
    "two brackets": ["r[1-10]n[01-10]", "r[1-100]n[001-100]", "r[1-100]n[0001-1000]"],
    "every third number": [
        f"n[{','.join(str(n) for n in range(0, 3 * count, 3))}]" for count in (100, 10_000, 100_000)
    ],
}
Expand = Callable[[str], list[str]]


PEERS: dict[str, tuple[str, Callable[[ModuleType], Expand]]] = {
    "ClusterShell": ("ClusterShell.NodeSet", lambda module: lambda text: list(module.NodeSet(text))),
    "python-hostlist": ("hostlist", lambda module: module.expand_hostlist),
}


def peers() -> dict[str, Expand | None]:
    found: dict[str, Expand | None] = {f"hpcinit {_version('hpcinit')}": expand}
    for package, (module, expander) in PEERS.items():
        try:
            found[f"{package} {_version(package)}"] = expander(import_module(module))
        except ImportError:
            found[package] = None
    return found | _scontrol()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(source tree)"


def _scontrol() -> dict[str, Expand | None]:
    path = shutil.which("scontrol")
    if not path:
        return {"scontrol": None}
    conf = Path(tempfile.mkdtemp(), "slurm.conf")
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=localhost\n")
    env = {**os.environ, "SLURM_CONF": str(conf)}

    def show(text: str) -> list[str]:
        return _output([path, "show", "hostnames", text], env).split()

    return {_output([path, "--version"], env).strip(): show}


def _output(words: list[str], env: dict[str, str]) -> str:
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout


def median_ms(call: Callable[[], object], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def cell(peer: Expand | None, text: str, hosts: list[str]) -> str:
    if peer is None:
        return "not installed"
    try:
        found = peer(text)
    except OSError:
        return "argument too long"  # Linux allows 128 KiB in one argument
    except Exception as error:  # a limit of a peer is a result too
        return f"refused ({type(error).__name__})"
    if len(found) != len(hosts):
        return f"wrong: {len(found):,} hosts"
    # ClusterShell's answer is a set, sorted.
    note = "" if found == hosts else " (other order)"
    return f"{median_ms(lambda: peer(text)):,.3f}{note}"


def main() -> None:
    programs = peers()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{cores} cores {platform.machine()}, Python {platform.python_version()}, {sys.platform}"
    print(f"{date.today()}, {machine};")
    print(f"medians of {REPEATS}.\n\nexpand, milliseconds:\n")
    print("| nodelist | hosts | " + " | ".join(programs) + " |")
    print("|---|---:|" + "---:|" * len(programs))
    for shape, texts in SHAPES.items():
        for text in texts:
            hosts = expand(text)
            cells = " | ".join(cell(peer, text, hosts) for peer in programs.values())
            print(f"| {shape} | {len(hosts):,} | {cells} |")
    print("\nfirst, microseconds:\n\n| nodelist | hosts | characters | hpcinit |\n|---|---:|---:|---:|")
    for shape, texts in SHAPES.items():
        for text in texts:
            took = median_ms(lambda text=text: first(text), repeats=101) * 1000  # type: ignore[misc]
            print(f"| {shape} | {len(expand(text)):,} | {len(text):,} | {took:,.1f} |")


if __name__ == "__main__":
    main()
