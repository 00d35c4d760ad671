"""`hpcinit logs RUN [--rank 3 | --all] [--follow]`: what the ranks printed."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcinit.facts import runfolder
from hpcinit.facts.errors import RequestError
from hpcinit.facts.ranges import ranges
from hpcinit.observe import find, sweep
from hpcinit.observe.poll import Poll


class Tail:
    """Lines as they are appended to a file that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def lines(self) -> Iterator[str]:
        """The whole lines that came since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return
        self._at += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")

    def rest(self) -> str:
        """What stands after the last line end, once: the last words of a rank that was killed."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


def ranks(path: Path) -> list[int]:
    """The ranks that have a log."""
    names = (re.fullmatch(r"rank-(\d+)\.log", file.name) for file in (path / runfolder.LOGS).glob("rank-*.log"))
    return sorted(int(match[1]) for match in names if match)


def of_rank(path: Path, rank: int) -> Path:
    return path / runfolder.RANK_LOG.format(rank=rank)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hpcinit logs", description="What the ranks of a run printed.")
    parser.add_argument("run", help="run folder, its name, or a job id")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, default=0)
    which.add_argument("--all", action="store_true", help="every rank, each line with its rank in front")
    which.add_argument("--job", action="store_true", help="the batch script's own output")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run is over")
    options = parser.parse_args(argv)
    path = find.find(options.run, options.runs_dir)
    if sweep.is_sweep(path):
        numbers = ranges(sweep.combinations(path))
        raise RequestError(f"{path} is a sweep of the tasks {numbers}, expected one: hpcinit logs {options.run}/0")
    if not (options.follow or options.all or options.job) and options.rank not in ranks(path):
        raise RequestError(f"{path} has no log of rank {options.rank}; there are: {ranks(path) or 'none yet'}")
    tails: dict[str, Tail] = {}
    poll = Poll(path) if options.follow else None
    while True:
        over = poll is None or poll.ask()
        _tails(tails, path, options)
        for prefix, tail in tails.items():
            for line in tail.lines():
                print(prefix + line)
            if over and (rest := tail.rest()):
                print(prefix + rest)
        sys.stdout.flush()
        if over:
            return 0
        time.sleep(1)


def _tails(tails: dict[str, Tail], path: Path, options: argparse.Namespace) -> None:
    """Add what has appeared since: a rank's log is there once the rank has started."""
    if options.job:
        tails.setdefault("", Tail(path / runfolder.JOB_LOG))
    elif options.all:
        for rank in ranks(path):
            tails.setdefault(f"{rank}: ", Tail(of_rank(path, rank)))
    else:
        tails.setdefault("", Tail(of_rank(path, options.rank)))
