"""`hpcinit logs RUN [--rank 0,4-7 | --all] [--follow]`: prints the logs of a run's ranks."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcinit.base import console, json_output, safe_files
from hpcinit.base.errors import RequestError
from hpcinit.base.text import ranges
from hpcinit.observe import find_runs
from hpcinit.observe.poll import Polls
from hpcinit.records import run_folder

STATE_S = 1.0  # with --follow, the time between two checks of the run's state and for new log files
READ_S = 0.1  # with --follow, the time between two checks for new lines, per log file


class Tail:
    """Reads lines as they are appended to a file. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def lines(self) -> Iterator[str]:
        """Yield the complete lines that were appended to the file since the last call."""
        try:
            with safe_files.open_file(self._path) as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return
        self._at += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")

    def rest(self) -> str:
        """Return the incomplete last line, but only once. A killed rank may leave such a line."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class Source(NamedTuple):
    """The log of a rank or of the batch script.

    rank: the rank, or None for the batch script.
    task: the number of the sweep's task, or None.
    prefix: the text that is printed before each line.
    """

    rank: int | None = None
    task: int | None = None
    prefix: str = ""

    def shown(self, line: str, as_json: bool, to_terminal: bool = False) -> str:
        """Return a line of the log as `hpcinit logs` prints it.

        as_json: whether to return a JSON object.
        to_terminal: whether to show only the last state of a progress bar, and no control sequences except colors.
        """
        if not as_json:
            return self.prefix + (console.colored(line.rstrip("\r").rpartition("\r")[2]) if to_terminal else line)
        return json_output.line("logs", {"task": self.task, "rank": self.rank, "line": line})


def ranks(path: Path) -> list[int]:
    """Return the ranks that have a log in the run folder `path`."""
    names = (re.fullmatch(r"rank-(\d+)\.log", file.name) for file in (path / run_folder.LOGS).glob("rank-*.log"))
    return sorted(int(match[1]) for match in names if match)


def of_rank(path: Path, rank: int) -> Path:
    return path / run_folder.RANK_LOG.format(rank=rank)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit logs", description="Print the logs of a run's ranks.")
    parser.add_argument("run", nargs="?", default="", help="run folder, its name, or a job id")
    find_runs.add_runs_dir(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--rank", default="0", help="one rank, or several: 0,4-7; with several, each line starts with its rank"
    )
    which.add_argument("--all", action="store_true", help="every rank; for a sweep, every rank of every task")
    which.add_argument("--job", action="store_true", help="the output of the batch script")
    parser.add_argument("--follow", "-f", action="store_true", help="print new lines until the run has ended")
    return console.add_verbosity_options(parser, "one JSON object per line of a log, with its rank")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    path = find_runs.find_run(options.run, options.runs_dir)
    wanted = parse_ranks(options.rank)
    if find_runs.is_sweep(path) and not options.all:
        numbers = ranges(find_runs.combinations(path))
        raise RequestError(
            f"{path} is a sweep with the tasks {numbers}: name one task, as in hpcinit logs {options.run}/0, or use "
            "--all"
        )
    there = ranks(path)
    missing = [] if options.follow or options.all or options.job else sorted(set(wanted) - set(there))
    if missing:
        which_rank = f"rank {missing[0]}" if len(missing) == 1 else f"the ranks {ranges(missing)}"
        raise RequestError(f"{path} has no log of {which_rank}; ranks with a log: {ranges(there) or 'none yet'}")
    _show(path, options, wanted)
    return 0


def _show(path: Path, options: argparse.Namespace, wanted: Sequence[int]) -> None:
    tails: dict[Source, Tail] = {}
    polls = Polls([path]) if options.follow else None
    to_terminal = sys.stdout.isatty()
    over, asked = False, -math.inf
    while True:
        if time.monotonic() - asked >= STATE_S:
            asked = time.monotonic()
            over = polls is None or polls.ask()
            _tails(tails, path, options, wanted)
        for source, tail in tails.items():
            for line in tail.lines():
                print(source.shown(line, options.json, to_terminal))
            if over and (rest := tail.rest()):
                print(source.shown(rest, options.json, to_terminal))
        sys.stdout.flush()
        if over:
            return
        time.sleep(min(STATE_S, READ_S * max(1, len(tails))))


def parse_ranks(text: str) -> list[int]:
    """Return the ranks in a text: [0, 4, 5] for '0,4-5'. Raise RequestError if the text is something else."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise RequestError(f"--rank is {text!r}, expected one or more ranks: 3, or 0,4-7")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def _tails(tails: dict[Source, Tail], path: Path, options: argparse.Namespace, wanted: Sequence[int]) -> None:
    """Add logs that have been created since the last call. A rank creates its log when it starts."""
    if options.job:
        tails.setdefault(Source(), Tail(path / run_folder.JOB_LOG))
    elif find_runs.is_sweep(path):
        for number in find_runs.combinations(path):
            task = path / str(number)
            for rank in ranks(task):
                tails.setdefault(Source(rank, number, f"{number}/{rank}: "), Tail(of_rank(task, rank)))
    else:
        for rank in ranks(path) if options.all else wanted:
            prefix = f"{rank}: " if options.all or len(wanted) > 1 else ""
            tails.setdefault(Source(rank, None, prefix), Tail(of_rank(path, rank)))
