"""`hpcinit status [RUN ...|all] [--json]`: prints one line per run. Without RUN, it prints all runs in ./runs.

In a terminal, it prints a table with progress bars. Otherwise it prints plain lines, or JSON for programs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import console, json_output
from hpcinit.base.console import plain
from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted
from hpcinit.engine import from_record
from hpcinit.observe import find_runs, overview, progress, requests
from hpcinit.observe.overview import Run
from hpcinit.observe.requests import Submission
from hpcinit.observe.run_details import again, details, documents, job_of, result, settings, submitted
from hpcinit.records import job_record
from hpcinit.slurm import reasons
from hpcinit.slurm.queue import QueueQuery


def lines(run: Run, each_task: bool, about: str = "") -> Iterator[str]:
    """Yield the lines that `hpcinit status` prints for a run if stdout is not a terminal.

    each_task: whether to list the tasks of a sweep.
    about: the arguments of the run, which are printed last.
    """
    if run.now:
        now = run.now
        combination = settings(run.task) if run.task else ""
        parts = [details(run.path, now), submitted(run.path), combination, about]
        yield f"{run.name:24} {now.job_id:>9}  {now.name:10} {'  '.join(filter(None, parts))}".rstrip()
    elif run.tasks:
        states = f"{counted(len(run.tasks), 'task')}: {find_runs.count_states(run.tasks)}"
        yield f"{run.path.name:24} {job_of(run):>9}  {states}"
        if each_task:
            for task in run.tasks:
                about = f"{task.number:>6}  {task.state.job_id:>12}  {task.state.name:13} {settings(task)}"
                yield "  ".join(filter(None, (about, again(task), details(task.path, task.state)))).rstrip()


def shortest(run: Run) -> Iterator[str]:
    """Yield the shortest description of a run, 'train-0001 RUNNING', or of each task, 'sweep-0001/3 COMPLETED'."""
    if run.now:
        yield f"{run.name} {run.now.name}"
    for task in run.tasks:
        yield f"{run.path.name}/{task.number} {task.state.name}"


def meanings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield an explanation of each reason that Slurm reports for these runs. Each reason is explained once."""
    for reason in dict.fromkeys(now.reason for run in runs for _, now in run.parts):
        if meaning := reasons.explain(reason):
            yield f"{reason}: {meaning}"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit status", description="Show the state of runs.")
    parser.add_argument("run", nargs="*", help="run folder, its name, a job id, or all (the default)")
    find_runs.add_runs_dir(parser)
    parser.add_argument(
        "--sort", metavar="NAME", help="sort runs and tasks by a metric, such as loss, or by result, step or submitted"
    )
    parser.add_argument("--reverse", action="store_true", help="with --sort: the largest value first")
    parser.add_argument(
        "--top", type=int, metavar="N", help="only the first N; with --sort, the N with the smallest value"
    )
    parser.add_argument("--csv", action="store_true", help="one line per run or task, for spreadsheets and pandas")
    return console.add_verbosity_options(parser, "one JSON object per line, for programs")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    if options.csv and options.json:
        raise RequestError("--csv and --json cannot be combined: use only one of them")
    every = find_runs.means_all_runs(options.run)
    runs = _all_runs(options.runs_dir) if every else _named_runs(options.run, options.runs_dir)
    for run in runs:
        if run.error and not every:
            raise run.error
        if run.error:  # an invalid folder must not hide the others
            console.note(f"{run.path.name:24} {run.error}")
    known = [run for run in runs if not run.error]
    if options.sort:
        known = sort(overview.each_task(known), options.sort, options.reverse)
    _print(known[: options.top], options, each_task=not every)
    return 0


def _print(known: Sequence[Run], options: argparse.Namespace, each_task: bool) -> None:
    if options.json:
        for run in known:
            for document in documents(run):
                print(json_output.line("status", document))
    elif options.csv:
        from hpcinit.observe import status_csv  # noqa: PLC0415 - rarely needed

        status_csv.write(known)
    elif options.quiet:
        for run in known:
            print(plain("\n".join(shortest(run))))
    elif sys.stdout.isatty():
        _table(known, each_task)
    else:
        texts = zip(known, _arguments(known), strict=True)
        shown = [line for run, about in texts for line in lines(run, each_task, about)]
        shown += meanings([run for run in known if run.now or each_task])
        if shown:
            print(plain("\n".join(shown)))


def _all_runs(runs_dir: Path) -> list[Run]:
    """Return all runs in the folder, and queued runs whose folder was deleted.

    Raise RequestError if there are none.
    """
    paths = find_runs.all_runs(runs_dir)
    slurm = (not paths and runs_dir.is_dir()) or any(_uses_slurm(path) for path in paths)
    queue = QueueQuery("--me", ended=True) if slurm else None
    runs = [*overview.read(paths, queue, newest=True), *(overview.without_folder(runs_dir, queue) if queue else ())]
    return runs or _read([], runs_dir)


def _read(names: Sequence[str], runs_dir: Path) -> list[Run]:
    return overview.read(find_runs.matching_runs(names, runs_dir), newest=True)


def _named_runs(names: Sequence[str], runs_dir: Path) -> list[Run]:
    """Return the runs with these names, including queued runs whose folder was deleted.

    Raise RequestError if one of the names has no run.
    """
    try:
        return _read(names, runs_dir)
    except RequestError:
        queue = QueueQuery("--me", ended=True)
        deleted = {name: _deleted(name, runs_dir, queue) for name in names}
        if not any(deleted.values()):
            raise
        found = [deleted[name] or _read([name], runs_dir) for name in names]
        return [run for runs in found for run in runs]


def _deleted(name: str, runs_dir: Path, queue: QueueQuery) -> list[Run]:
    """Return the run with this name, path or job id if its job is still queued but its folder was deleted."""
    folder = Path(name).parent if "/" in name else runs_dir
    runs = overview.without_folder(folder, queue)
    return [run for run in runs if run.now and (run.path.name == Path(name).name or run.now.job_id == name)]


def _uses_slurm(path: Path) -> bool:
    try:
        return from_record(job_record.submission(path)).uses_slurm
    except RequestError:
        return False


def _arguments(runs: Sequence[Run]) -> list[str]:
    """Return the arguments to show for each run, or '' for tasks and sweeps, which show their overrides instead."""
    submissions = [requests.read(run.path) if run.now and not run.task else Submission() for run in runs]
    return requests.distinguish(submissions)


def _table(runs: Sequence[overview.Run], each_task: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - for a terminal only

    from hpcinit.observe.status_table import status_table  # noqa: PLC0415 - rich

    out = Console(highlight=False, color_system=console.color_system())
    out.print(status_table(runs, each_task, about=_arguments(runs)))
    for text in meanings([run for run in runs if run.tasks and each_task]):
        print(plain(text))


RESULT, STEP, SUBMITTED = "result", "step", "submitted"


def values(path: Path) -> dict[str, Any]:
    """Return the values by which the run in `path` can be sorted."""
    document = progress.read(path)
    found: dict[str, Any] = {**document.get("values", {})}
    if document:
        found.setdefault(STEP, document["step"])
    if (value := result(path)) is not None:
        found.setdefault(RESULT, value)
    if (submitted := requests.submitted(path)) is not None:
        found.setdefault(SUBMITTED, submitted)
    return found


def sort(runs: Sequence[Run], key: str, reverse: bool) -> list[Run]:
    """Return the runs sorted by the value of `key`, smallest first. Runs without the value, or with NaN, are last.

    reverse: whether the largest value is first.

    Raise RequestError if no run has the value.
    """
    known = [(run, values(run.path)) for run in runs]
    if runs and not any(key in found for _, found in known):
        names = ", ".join(dict.fromkeys(name for _, found in known for name in found)) or "none"
        raise RequestError(f"--sort is {key!r}, but no run has a value with this name, expected one of: {names}")
    ranked = [(_number(found.get(key)), run) for run, found in known]
    usable = sorted(((number, run) for number, run in ranked if number is not None), key=_first, reverse=reverse)
    return [run for _, run in usable] + [run for number, run in ranked if number is None]


def _first(pair: tuple[float, Run]) -> float:
    return pair[0]


def _number(value: object) -> float | None:
    """Return the number by which a value is sorted: the value, or the first one of a list. Return None for NaN."""
    first = value[0] if isinstance(value, tuple | list) and value else value
    return float(first) if isinstance(first, int | float) and not math.isnan(first) else None
