"""`hpcinit logs RUN [--rank 0,4-7 | --all] [--follow]`: what the ranks printed."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcinit.base import console
from hpcinit.base.errors import RequestError
from hpcinit.base.text import ranges
from hpcinit.observe import find_runs
from hpcinit.observe.poll import Polls
from hpcinit.records import run_folder


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


class Source(NamedTuple):
    """Whose log: rank None is the batch script's own; task, of a sweep. prefix: before each line of several."""

    rank: int | None = None
    task: int | None = None
    prefix: str = ""

    def shown(self, line: str, as_json: bool, to_terminal: bool = False) -> str:
        """to_terminal: of a line that was overwritten with carriage returns the last state, as a terminal shows it, and
        no control sequences but colors. Other outputs get every byte."""
        if not as_json:
            return self.prefix + (console.colored(line.rstrip("\r").rpartition("\r")[2]) if to_terminal else line)
        task = {} if self.task is None else {"task": self.task}
        return json.dumps({**task, "rank": self.rank, "line": line})


def ranks(path: Path) -> list[int]:
    """The ranks that have a log."""
    names = (re.fullmatch(r"rank-(\d+)\.log", file.name) for file in (path / run_folder.LOGS).glob("rank-*.log"))
    return sorted(int(match[1]) for match in names if match)


def of_rank(path: Path, rank: int) -> Path:
    return path / run_folder.RANK_LOG.format(rank=rank)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit logs", description="What the ranks of a run printed.")
    parser.add_argument("run", nargs="?", default="", help="run folder, its name, or a job id")
    find_runs.add_runs_dir(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--rank", default="0", help="one, or several: 0,4-7; each line of several with its rank in front"
    )
    which.add_argument("--all", action="store_true", help="every rank; of a sweep, of every task")
    which.add_argument("--job", action="store_true", help="the batch script's own output")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run is over")
    return console.add_verbosity_options(parser, "one JSON object per line of a log, with its rank")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    path = find_runs.find_run(options.run, options.runs_dir)
    asked = _asked(options.rank)
    if find_runs.is_sweep(path) and not options.all:
        numbers = ranges(find_runs.combinations(path))
        raise RequestError(
            f"{path} is a sweep of the tasks {numbers}, expected one: hpcinit logs {options.run}/0, or --all"
        )
    there = ranks(path)
    lacking = [] if options.follow or options.all or options.job else sorted(set(asked) - set(there))
    if lacking:
        which_rank = f"rank {lacking[0]}" if len(lacking) == 1 else f"the ranks {ranges(lacking)}"
        raise RequestError(f"{path} has no log of {which_rank}; there are: {ranges(there) or 'none yet'}")
    _show(path, options, asked)
    return 0


def _show(path: Path, options: argparse.Namespace, asked: Sequence[int]) -> None:
    tails: dict[Source, Tail] = {}
    polls = Polls([path]) if options.follow else None
    to_terminal = sys.stdout.isatty()
    while True:
        over = polls is None or polls.ask()
        _tails(tails, path, options, asked)
        for source, tail in tails.items():
            for line in tail.lines():
                print(source.shown(line, options.json, to_terminal))
            if over and (rest := tail.rest()):
                print(source.shown(rest, options.json, to_terminal))
        sys.stdout.flush()
        if over:
            return
        time.sleep(1)


def _asked(text: str) -> list[int]:
    """[0, 4, 5] of '0,4-5'. Raises RequestError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise RequestError(f"--rank is {text!r}, expected a number or several: 3, or 0,4-7")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def _tails(tails: dict[Source, Tail], path: Path, options: argparse.Namespace, asked: Sequence[int]) -> None:
    """Add what has appeared since: a rank's log is there once the rank has started."""
    if options.job:
        tails.setdefault(Source(), Tail(path / run_folder.JOB_LOG))
    elif find_runs.is_sweep(path):
        for number in find_runs.combinations(path):
            task = path / str(number)
            for rank in ranks(task):
                tails.setdefault(Source(rank, number, f"{number}/{rank}: "), Tail(of_rank(task, rank)))
    else:
        for rank in ranks(path) if options.all else asked:
            prefix = f"{rank}: " if options.all or len(asked) > 1 else ""
            tails.setdefault(Source(rank, None, prefix), Tail(of_rank(path, rank)))
