"""The table that `status` and `watch` print to a terminal. rich decides about colors (NO_COLOR)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcinit.base.console import plain, style
from hpcinit.observe import find_runs, progress
from hpcinit.observe.overview import Run
from hpcinit.observe.state import State
from hpcinit.observe.status import details, job_of, submitted, times_alone
from hpcinit.slurm import reasons

STYLES = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "yellow", "COMPLETING": "cyan", "UNKNOWN": "magenta"}
BAR = 12  # characters
COLUMNS = ("run", "job", "state", "", "", "time", "submitted", "")
Row = Sequence[RenderableType]


def status_table(runs: Sequence[Run], each_task: bool, most: int | None = None, about: Sequence[str] = ()) -> Table:
    """Return a table with a row for each run, and for each task of a sweep if `each_task`.

    most: the largest number of rows; the last one then counts those that are not shown.
    about: the arguments of each run.
    """
    texts = about or [""] * len(runs)
    each = zip(runs, texts, strict=True)
    rows = [row for run, text in each for row in _rows(run, each_task, most is None, text)]
    used = [number for number, name in enumerate(COLUMNS) if name or any(row[number] for row in rows)]
    table = Table(box=None, pad_edge=False, header_style=style("bold"))
    for number in used:
        table.add_column(COLUMNS[number], no_wrap=number < len(COLUMNS) - 1, overflow="fold")
    shown = rows if most is None or len(rows) <= most else rows[: max(1, most - 1)]
    for row in shown:
        table.add_row(*(row[number] for number in used))
    if len(shown) < len(rows):
        table.add_row(f"and {len(rows) - len(shown)} more")
    return table


def _rows(run: Run, each_task: bool, in_order: bool, about: str) -> Iterator[Row]:
    if run.now:
        combination = run.task.combination if run.task else ""
        texts = (reasons.explain(run.now.reason), combination, about)
        yield _row(run.name, run.path, run.now, "  ".join(filter(None, texts)))
    elif run.tasks:
        over = sum(task.state.over for task in run.tasks)
        counts = find_runs.count_states(run.tasks)
        yield [run.path.name, job_of(run), f"{len(run.tasks)} tasks", _bar(over, len(run.tasks)), "", "", "", counts]
        if each_task:
            tasks = run.tasks if in_order else sorted(run.tasks, key=_interest)
            yield from (_row(f"  {task.number}", task.path, task.state, task.combination) for task in tasks)


def _row(name: str, path: Path, now: State, about: str) -> Row:
    document = progress.read(path) if now.name not in ("PENDING", find_runs.NOT_SUBMITTED) else {}
    return [
        Text(plain(name)),
        Text(plain(now.job_id)),
        Text(now.name, STYLES.get(now.name, "red" if now.over else "")),
        _bar(document["step"], document["total"]) if document else "",
        f"{document['step']}/{document['total']}" if document else "",
        times_alone(now),
        submitted(path).removeprefix("submitted "),
        Text(plain("  ".join(filter(None, (details(path, now, table=True), about))))),
    ]


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, width=BAR)


def _interest(task: find_runs.Task) -> int:
    """Return a sort key: running tasks first, then failed, waiting and successful ones."""
    if not task.state.over:
        return 2 if task.state.name in ("PENDING", find_runs.NOT_SUBMITTED) else 0
    return 1 if task.status else 3
