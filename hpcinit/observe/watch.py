"""`hpcinit watch [RUN ...] [--json]`: shows the states of runs until all of them are over."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import console as console_module
from hpcinit.base import json_output
from hpcinit.base.console import plain
from hpcinit.base.errors import INTERRUPTED
from hpcinit.observe import find_runs, overview, progress, run_details, status
from hpcinit.observe.poll import Polls
from hpcinit.observe.state import State

LOOK_S = 1.0  # interval of reading the run folders; Slurm is queried less often


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit watch",
        description="Show the state of runs until all have ended. The exit status is the highest one of these runs.",
    )
    parser.add_argument(
        "run", nargs="*", help="run folder, its name, a job id, or all; default: all runs that have not ended"
    )
    find_runs.add_runs_dir(parser)
    return console_module.add_verbosity_options(parser, "each change as a JSON object, one per line")


def main(argv: Sequence[str]) -> int:
    options = console_module.parse_arguments(parser(), list(argv))
    every = find_runs.means_all_runs(options.run)
    paths = find_runs.matching_runs(options.run, options.runs_dir)
    try:
        if every:
            paths = [run.path for run in overview.read(paths, newest=True) if not run.error and not run.over]
            if not paths:
                console_module.note(f"all runs in {options.runs_dir.absolute()} have ended")
                return 0
        return _watch(Polls(paths), options.json)
    except KeyboardInterrupt:
        console_module.note("\nstopped watching; the jobs continue. Cancel them with:  hpcinit cancel RUN")
        return INTERRUPTED


def _watch(polls: Polls, as_json: bool) -> int:
    if console_module.quiet() and not as_json:
        _silently(polls)
    elif sys.stdout.isatty() and not as_json:
        _live(polls)
    else:
        for line in changes(polls, as_json):
            print(line, flush=True)
    return max(run.status for run in polls.now)


def _silently(polls: Polls) -> None:
    while not polls.ask():
        time.sleep(LOOK_S)
    for run in polls.now:
        print(plain("\n".join(status.shortest(run))))


def _live(polls: Polls) -> None:
    from rich.console import Console  # noqa: PLC0415 - for a terminal only
    from rich.live import Live  # noqa: PLC0415

    from hpcinit.observe import status_table  # noqa: PLC0415

    console = Console(highlight=False, color_system=console_module.color_system())
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        over = False
        while not over:
            over = polls.ask()
            live.update(
                status_table.status_table(polls.now, each_task=True, most=max(2, console.height - 2)), refresh=True
            )
            if not over:
                time.sleep(LOOK_S)
    for text in status.meanings(polls.now):
        console.print(plain(text), markup=False)


def changes(polls: Polls, as_json: bool = False) -> Iterator[str]:
    """Yield a line for each change in the state of a run, until all runs are over."""
    start, printed = time.monotonic(), dict[Path, Any]()
    over = False
    while not over:
        over = polls.ask()
        for run in polls.now:
            for text in _json(run, printed) if as_json else _lines(run, printed):
                yield text if as_json else f"[{time.monotonic() - start:.0f} s] {plain(text)}"
        if not over:
            time.sleep(LOOK_S)


def _lines(run: overview.Run, printed: dict[Path, Any]) -> Iterator[str]:
    """Yield a line for each job that has changed. All waiting tasks of a sweep share one line."""
    names = {task.path: task.name for task in run.tasks}
    for path, now in run.parts:
        seen = (now.job_id, now.name, now.reason, bool(progress.hang_note(path, now)), _not_finite(path, now))
        if printed.get(path) == seen or (run.tasks and now.name == "PENDING" and path not in printed):
            continue
        printed[path] = seen
        name = names.get(path, path.name)
        yield f"{name} {now.job_id} {now.name}  {run_details.details(path, now)}".rstrip()
    if run.tasks and printed.get(run.path) != (counts := find_runs.count_states(run.tasks)):
        printed[run.path] = counts
        yield f"{run.path.name}: {counts}"


def _not_finite(path: Path, now: State) -> bool:
    return now.name != "PENDING" and bool(progress.not_finite_note(progress.read(path)))


def _json(run: overview.Run, printed: dict[Path, Any]) -> Iterator[str]:
    documents = {Path(document["run"]): document for document in run_details.documents(run)}
    for path, document in documents.items():
        seen = [document.get(key) for key in ("job_id", "state", "reason", "exit_status", "progress", "hang")]
        if printed.get(path) != seen:
            printed[path] = seen
            yield json_output.line("status", document)
