"""What do very many connecting ranks cost rank 0, with hpcinit's rendezvous and with torch's store?

    python -m benchmarks.store [--ranks 64 256 1024 4096 16384] [--rounds 5] [--json FILE]

One machine, loopback. Rank 0 is a separate process with hpcinit's server or torch's TCPStore. Two processes simulate
all other ranks, each with its own connections and the messages of a real rank (benchmarks/crowd.py). All ranks start at
the same time, which is the worst case. Measured: from that time until the last rank is up. Every round runs each way
once:

  plain        torch: TCPStore with wait_for_workers, and c10d's _store_based_barrier
  rendezvous   hpcinit: join, identity check, barrier until all ranks are in init, joined, up; without torch's store
  both         hpcinit with torch's store, as in hpcinit.init
  missing      hpcinit with three absent ranks: from the deadline until every rank has the list of them

CPU and memory are those of rank 0 only. The simulated ranks use more of this machine's cores than rank 0, so wall times
are longer than on a cluster. Two more ways for --ways: `busy` is `rendezvous` while rank 0's program computes, and
`slow` is the same with Python's default switch interval of 5 ms (rendezvous/server.py).

torch's store resolves the host name of each peer, one after the other in its only thread. As root, rank 0 uses only
/etc/hosts, which is fast; with --dns it uses the resolver of this machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import crowd, formulas
from hpcinit.rendezvous import server
from hpcinit.rendezvous.rendezvous_client import Stage
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.world import World, ports

ABSENT = 3  # absent ranks of `missing`
AHEAD_S = 1.0  # a round is announced this long before it starts
LATEST_S = 600.0
# A mount namespace for rank 0, in which the resolver uses no DNS server.
NO_DNS = "echo 'hosts: files' > $0 && mount --bind $0 /etc/nsswitch.conf && exec \"$@\""


def rank_0(way: str, world_size: int) -> None:
    """Print the port as a line of JSON, serve the ranks, and print the usage as a line of JSON."""
    if way in {"plain", "both"}:
        import torch.distributed  # noqa: F401, PLC0415
    server.allow_many_files(world_size)
    if way == "plain":
        _plain(world_size)
    else:
        _server(way, world_size)


def _usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": used.ru_utime + used.ru_stime, "rss_mb": used.ru_maxrss / 1024}


def _print(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _plain(world_size: int) -> None:
    from torch.distributed import TCPStore  # noqa: PLC0415
    from torch.distributed.distributed_c10d import _store_based_barrier  # noqa: PLC0415

    port = ports.candidate_ports(str(os.getpid()))[0]
    before, timeout = _usage(), datetime.timedelta(seconds=LATEST_S)
    threading.Thread(target=lambda: (time.sleep(AHEAD_S / 2), _print(port=port)), daemon=True).start()
    store = TCPStore(crowd.HERE, port, world_size, True, timeout, wait_for_workers=True)
    name = crowd.BARRIER.partition(":")[2]
    _store_based_barrier(0, store, name, world_size, timeout)
    _done(before)


def _done(before: Mapping[str, float]) -> None:
    after = _usage()
    _print(**{name: after[name] - before[name] for name in after})
    sys.stdin.readline()


def _server(way: str, world_size: int) -> None:
    candidates = ports.candidate_ports(str(os.getpid()))
    hosts = tuple(f"n{number}" for number in range(world_size))
    world = World("slurm", 0, world_size, 0, 1, 0, hosts, crowd.HERE, candidates, "77.0.0")
    if way == "slow":
        server.QUICK_S = 0.005  # Python's default
    before = _usage()
    rank_0 = RendezvousServer(world, crowd.HERE, crowd.KEY, crowd.JOB, crowd.MADE_OF)
    _print(port=rank_0.port)
    deadline = time.monotonic() + LATEST_S
    if way == "missing":
        _miss(rank_0)
    elif way in {"busy", "slow"}:
        while rank_0._stage < Stage.CONNECTED:  # a program that imports and computes
            sum(range(1000))
        rank_0.offer_store(1)
    rank_0.report_phase("imported")
    if way == "both":
        from hpcinit.runtime.torch_store import open_store  # noqa: PLC0415

        store = open_store(world, rank_0, deadline)  # noqa: F841
    elif way != "missing":
        rank_0.offer_store(1)
        rank_0.wait_for_store(deadline, 1e9)
    for phase in ("joined", "up"):
        rank_0.report_phase(phase)
    if way != "missing":
        rank_0._connections.join(LATEST_S)
    _done(before)


def _miss(rank_0: RendezvousServer) -> None:
    """Serve until the deadline that the parent sends, then report the missing ranks."""
    deadline = float(sys.stdin.readline())
    while time.monotonic() < deadline:
        time.sleep(0.01)
    print(rank_0.missing("started")[:200], file=sys.stderr)
    sys.stdin.readline()


def measure(way: str, world_size: int, crowds: int, deadline_s: float, dns: bool) -> dict[str, Any]:
    """Return the seconds of each mark since the start, rank 0's CPU seconds and memory, and messages per rank."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "benchmarks.store", "--rank-0", way, str(world_size)]
    if os.geteuid() == 0 and not dns:
        names = Path(tempfile.gettempdir()) / f"hpcinit-names-{os.getpid()}"
        command = ["unshare", "--mount", "sh", "-c", NO_DNS, str(names), *command]
    zero = subprocess.Popen(command, **pipes)
    others = [subprocess.Popen([sys.executable, "-m", "benchmarks.crowd"], **pipes) for _ in range(crowds)]
    try:
        for other in others:
            _read(other)
        port = json.loads(_read(zero))["port"]
        present = world_size - (ABSENT if way == "missing" else 0)
        edges = [1 + (present - 1) * part // crowds for part in range(crowds + 1)]
        begin = time.monotonic() + AHEAD_S
        task = {
            "way": way if way in crowd.WAYS else "rendezvous",
            "port": port,
            "begin": begin,
            "store": way == "both",
            "world_size": world_size,
            "deadline": begin + deadline_s,
        }
        for other, ranks in zip(others, itertools.pairwise(edges), strict=True):
            _write(other, json.dumps({**task, "ranks": ranks}))
        if way == "missing":
            _write(zero, str(begin + deadline_s))
        seen = [json.loads(_read(other)) for other in others]
        if way == "missing":
            _write(zero, "")
        used = json.loads(_read(zero))
    finally:
        for process in (zero, *others):
            process.kill()
            process.wait()
    marks = {name: max(each["marks"][name] for each in seen) for name in seen[0]["marks"]}
    if way == "missing":
        marks["reported"] -= deadline_s
    counts = sorted({tuple(count) for each in seen for count in each["messages"]})
    return {"marks": marks, **used, "messages": counts, "reconnects": sum(each["reconnects"] for each in seen)}


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"benchmarks.store: {process.args} ended with {process.wait()}")
    return line


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(line + "\n")
    process.stdin.flush()


def run(ways: Sequence[str], world_sizes: Sequence[int], rounds: int, dns: bool) -> list[dict[str, Any]]:
    """Return every measurement; of the largest world, at most three rounds."""
    found = []
    for world_size in world_sizes:
        for number in range(rounds if world_size < 16_384 else min(3, rounds)):
            for way in ways:
                took = measure(way, world_size, 2, 2 + world_size / 1000, dns)
                found.append({"way": way, "ranks": world_size, "round": number, **took})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| ranks | way | rounds | seconds until the last rank is up (min to max) | rank 0: CPU s | MB more "
        "| messages | reconnects |"
    ]
    lines.append("|--:|---|--:|--:|--:|--:|---|--:|")
    for ranks, way in dict.fromkeys((each["ranks"], each["way"]) for each in found):
        of = [each for each in found if (each["ranks"], each["way"]) == (ranks, way)]
        ends = [each["marks"].get("up", each["marks"].get("reported")) for each in of]
        counts = sorted({tuple(count) for each in of for count in each["messages"]})
        messages = " or ".join(f"{sent} + {got}" for sent, got in counts[:2]) + (", or more" if len(counts) > 2 else "")
        cpu, memory = median(each["cpu_s"] for each in of), median(each["rss_mb"] for each in of)
        lines.append(
            f"| {ranks:,} | {way} | {len(of)} | {median(ends):.2f} ({min(ends):.2f} to {max(ends):.2f}) | {cpu:.2f} | "
            f"{memory:.0f} | {messages} | {median(each.get('reconnects', 0) for each in of):.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096, 16_384])
    parser.add_argument("--ways", nargs="+", default=["plain", "rendezvous", "both", "missing"])
    parser.add_argument("--rounds", type=int, default=5, help="at most 3 with 16384 ranks (default: 5)")
    parser.add_argument("--json", type=Path, help="write every measurement, for benchmarks.formulas")
    parser.add_argument("--dns", action="store_true", help="use the resolver of this machine")
    parser.add_argument("--rank-0", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_0:
        rank_0(options.rank_0[0], int(options.rank_0[1]))
        return 0
    load = os.getloadavg()[0]
    found = run(options.ways, options.ranks, options.rounds, options.dns)
    machine = f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}"
    print(f"{datetime.date.today()}, {machine}; load average before {load:.1f}, after {os.getloadavg()[0]:.1f}\n")
    print(table(found))
    print("\n" + formulas.table(found))
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
