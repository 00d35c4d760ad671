"""Follows a run until it ends: prints its state, its progress, rank 0's output, and the first cause of a failure."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hpcinit.base import console as console_module
from hpcinit.base.console import plain
from hpcinit.base.errors import INTERRUPTED
from hpcinit.base.text import ranges
from hpcinit.observe import continuation, find_runs, logs, progress, state, watch
from hpcinit.observe.poll import Polls
from hpcinit.records import run_folder
from hpcinit.slurm import reasons
from hpcinit.why import why_command

LOOK_S = 0.2  # between two reads of the run folder; Slurm is queried less often


def follow(path: Path) -> int:
    """Wait until the run has ended and return its exit status.

    After Ctrl-C, stop waiting and return 130. The job continues.
    """
    console = Console(highlight=False, soft_wrap=True, color_system=console_module.color_system())
    run = shlex.quote(str(path))
    try:
        end = _watch(path, console)
    except KeyboardInterrupt:
        console.print(f"\nstopped waiting; the job is still running. Check it:  hpcinit status {run}", markup=False)
        console.print(f"watch it:  hpcinit logs -f {run}    cancel it:  hpcinit cancel {run}", markup=False)
        return INTERRUPTED
    status = end.status
    _report(path, end, status, console)
    return status


def _watch(path: Path, console: Console) -> state.State:
    tail = logs.Tail(logs.of_rank(path, 0))
    started, poll, shown = time.monotonic(), Polls([path]), ""
    with console.status("") as line:
        while True:
            over, now = poll.ask(), poll.first
            for text in tail.lines():
                console.print(_shown(text, console))
            if over:
                if rest := tail.rest():
                    console.print(_shown(rest, console))
                return now
            passed = time.monotonic() - started
            about = f"{now.name} {now.reason}".strip()
            if about != shown and not console.is_terminal:
                console.print(f"[{passed:.0f} s] {about}", markup=False)
            if about != shown and (meaning := reasons.explain(now.reason)):
                console.print(f"{now.reason}: {meaning}", markup=False)
            shown = about
            line.update(Text(plain(f"{about}  {passed:.0f} s  {progress.line(path)}")))
            time.sleep(LOOK_S)


def _shown(line: str, console: Console) -> Text:
    """Return a line of a log as `hpcinit logs` prints it."""
    shown = logs.Source().shown(line, as_json=False, to_terminal=console.is_terminal)
    return Text.from_ansi(shown) if console.is_terminal else Text(shown)


def _report(path: Path, end: state.State, status: int, console: Console) -> None:
    if end.name == "COMPLETED":
        console.print(plain(f"COMPLETED  {progress.line(path)}".rstrip()), markup=False)
        console.print(f"logs of all ranks:  hpcinit logs --all {shlex.quote(str(path))}", markup=False)
        if what := continuation.continues(path, end):
            console.print(what, markup=False)
        else:
            again = f"{end.engine.script_command} {shlex.quote(str(path / run_folder.SCRIPT))}"
            console.print(f"run it again manually:  {again}", markup=False)
        return
    console.print(f"{end.name} {end.reason}".rstrip() + f", exit status {status}", markup=False)
    for text in why_command.lines(path, why_command.explain_run(path, end)):
        console.print(plain(text), markup=False)


def follow_sweep(path: Path) -> int:
    """Wait until all tasks of a sweep have ended and return their highest exit status, or 130 after Ctrl-C.

    Print each change as `hpcinit watch` does.
    """
    polls, run = Polls([path]), shlex.quote(str(path))
    try:
        for line in watch.changes(polls):
            print(line, flush=True)
    except KeyboardInterrupt:
        print(f"\nstopped waiting; the jobs are still running. Check them:  hpcinit status {run}")
        print(f"cancel them:  hpcinit cancel {run}")
        return INTERRUPTED
    tasks = [task for task in polls.now[0].tasks if task.state.name != find_runs.NOT_SUBMITTED]
    bad = [task.number for task in tasks if task.state.status]
    if bad:
        print(f"these tasks did not complete: {ranges(bad)}. Log of the first one:  hpcinit logs {run}/{bad[0]}")
    return max(task.state.status for task in tasks)
