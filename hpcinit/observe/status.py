"""`hpcinit status [RUN ...|all] [--json]`: a line per run; without RUN all of ./runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hpcinit.base import console
from hpcinit.base.console import plain
from hpcinit.observe import find_runs, overview, progress, restarts
from hpcinit.observe.overview import Run
from hpcinit.observe.state import State
from hpcinit.slurm import reasons

# How runs are shown: lines for any place, a table with bars for a terminal, JSON for programs.

OLD_S = 60.0  # a running training whose last step is older gets its age shown


def documents(run: Run) -> Iterator[dict[str, Any]]:
    """One for a run, one for each task of a sweep."""
    if run.error:
        yield {"run": str(run.path), "error": str(run.error)}
    for task in run.tasks:
        yield {
            "run": str(task.path),
            "task": task.number,
            "combination": task.combination,
            **_json(task.path, task.state),
        }
    if run.now:
        yield {"run": str(run.path), **_json(run.path, run.now)}


def _json(path: Path, now: State) -> dict[str, Any]:
    begun = now.name not in ("PENDING", find_runs.NOT_SUBMITTED)
    told = progress.read(path) if begun else {}
    return {
        **now.to_json(),
        "meaning": reasons.explain(now.reason),
        "progress": told,
        "restarts": restarts.document(path) if now.restart is not None else None,
        "step_age_s": progress.age_s(path, time.time()) if now.name == "RUNNING" else None,
        "hang": list(report.lines()) if (report := progress.hang_note(path, now)) else [],
        "stopped": progress.stop_note(path, now, told),
    }


def lines(run: Run, each_task: bool) -> Iterator[str]:
    """What `hpcinit status` prints of it where there is no terminal."""
    if run.now:
        now = run.now
        yield f"{run.path.name:24} {now.job_id:>9}  {now.name:10} {details(run.path, now)}".rstrip()
        if meaning := reasons.explain(now.reason):
            yield f"{'':24} {'':>9}  {meaning}"
    elif run.tasks:
        yield f"{run.path.name:24} {job_of(run):>9}  {len(run.tasks)} tasks: {find_runs.count_states(run.tasks)}"
        if each_task:
            for task in run.tasks:
                about = f"{task.number:>6}  {task.state.job_id:>12}  {task.state.name:13} {task.combination}"
                yield f"{about}  {details(task.path, task.state)}".rstrip()
            yield from meanings(run)


def shortest(run: Run) -> Iterator[str]:
    """'train-0001 RUNNING', of a sweep a line for each task: 'sweep-0001/3 COMPLETED'."""
    if run.now:
        yield f"{run.path.name} {run.now.name}"
    for task in run.tasks:
        yield f"{run.path.name}/{task.number} {task.state.name}"


def meanings(run: Run) -> Iterator[str]:
    """Each of Slurm's reasons in the run that has words, once."""
    for reason in dict.fromkeys(now.reason for _, now in run.parts):
        if meaning := reasons.explain(reason):
            yield f"{reason}: {meaning}"


def job_of(run: Run) -> str:
    """Of a sweep the first of its jobs."""
    if run.now:
        return run.now.job_id
    return next((now.job_id.partition("_")[0] for _, now in run.parts), "-")


def details(path: Path, now: State) -> str:
    """What else is known of a job: why and until when it waits, how far it is, how it ended."""
    status = "" if now.exit_status is None else f"exit status {now.exit_status}"
    begun = now.name not in ("PENDING", find_runs.NOT_SUBMITTED)
    before = restarts.words(restarts.read(path)) if now.restart is not None else ""
    again = restarts.words_inside(restarts.read_inside(path)) if now.restart is not None else ""
    parts = ["started by hand" if now.by_hand else "", now.link, now.reason, times(now), before, again, status]
    told = progress.read(path) if begun else {}
    parts += [progress.words(told), age(path, now), progress.notes(path, now, told)] if begun else []
    return "  ".join(part for part in parts if part)


def times(now: State) -> str:
    """'for 1:02:03, 57:57 left' of a job that runs, 'starts about 14:02 (in 0:12:00)' of one that waits."""
    found = times_alone(now)
    return f"{'for' if now.name == 'RUNNING' else 'starts about'} {found}" if found else ""


def times_alone(now: State) -> str:
    """Return times() without the words before it, for a column of a table."""
    if now.name == "RUNNING" and now.elapsed_s is not None:
        left = "" if now.left_s is None else f", {duration(now.left_s)} left"
        return f"{duration(now.elapsed_s)}{left}"
    if now.name == "PENDING" and now.start:
        return when(now.start, datetime.now())
    return ""


def when(start: str, now: datetime) -> str:
    """'14:02 (in 12:00)' of Slurm's '2026-11-21T14:02:00', with the date where it is another day's."""
    try:
        at = datetime.fromisoformat(start)
    except ValueError:
        return start
    left = (at - now).total_seconds()
    day = "" if at.date() == now.date() else f"{at:%Y-%m-%d} "
    return f"{day}{at:%H:%M}" + (f" (in {duration(left)})" if left > 0 else "")


def age(path: Path, now: State) -> str:
    """'last step 5:12 ago' where that is long."""
    if now.name != "RUNNING":
        return ""
    since = progress.age_s(path, time.time())
    return f"last step {duration(since)} ago" if since is not None and since > OLD_S else ""


def duration(seconds: float) -> str:
    """'1-02:03:04', '2:03:04', '3:04', as squeue writes it."""
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit status", description="How runs are doing.")
    parser.add_argument("run", nargs="*", help="run folder, its name, a job id, or all; default: all")
    find_runs.add_runs_dir(parser)
    return console.add_verbosity_options(parser, "one JSON object per line, for programs")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    every = find_runs.means_all_runs(options.run)
    runs = overview.read(find_runs.matching_runs(options.run, options.runs_dir))
    for run in runs:
        if run.error and not every:
            raise run.error
        if run.error:  # one odd folder must not hide the others
            console.note(f"{run.path.name:24} {run.error}")
    known = [run for run in runs if not run.error]
    if options.json:
        for run in known:
            for document in documents(run):
                print(json.dumps(document))
    elif options.quiet:
        for run in known:
            print(plain("\n".join(shortest(run))))
    elif sys.stdout.isatty():
        _table(known, each_task=not every)
    else:
        for run in known:
            for line in lines(run, each_task=not every):
                print(plain(line))
    return 0


def _table(runs: Sequence[overview.Run], each_task: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - for a terminal only

    from hpcinit.observe.status_table import status_table  # noqa: PLC0415 - rich

    Console(highlight=False).print(status_table(runs, each_task))
    for run in runs if each_task else ():
        for text in meanings(run) if run.tasks else ():
            print(plain(text))
