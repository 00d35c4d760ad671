"""Creates the table that `status` and `watch` print in a terminal.

The rich library decides whether to use colors. It honors NO_COLOR.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcinit.base.console import plain
from hpcinit.base.text import counted
from hpcinit.observe import find_runs, progress
from hpcinit.observe.overview import Run
from hpcinit.observe.run_details import again, details, job_of, parameters, submitted, times_alone
from hpcinit.observe.state import State
from hpcinit.slurm import reasons

STYLES = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "yellow", "COMPLETING": "cyan", "UNKNOWN": "magenta"}
BAR = 12  # characters
LEAST = 20  # characters for the details in a row; if the terminal has fewer, the details are below the table
BAR_COLUMN, STEP_COLUMN = "bar", "step"  # columns without a title
LEFT_OUT = (BAR_COLUMN, "submitted", "time")  # columns that are omitted in a narrow terminal, in this order


@dataclass(frozen=True)
class _Row:
    """One line of the table.

    cells: the content of each column, by name. The column for a parameter of a sweep is '=NAME'. Empty cells may be
        omitted.
    details: the text of the last column.
    """

    cells: Mapping[str, Text | ProgressBar]
    details: str


@dataclass(frozen=True)
class StatusTable:
    """The table that `hpcinit status` prints, as an object that rich can print.

    rows: the rows, in order.
    most: how many lines to print at most; None: all. If there are more rows, the last line shows how many are omitted.
    """

    rows: Sequence[_Row]
    most: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        parameters = dict.fromkeys(name for row in self.rows for name in row.cells if name.startswith("="))
        columns = {
            name: [row.cells.get(name, Text()) for row in self.rows]
            for name in ("run", "job", "state", *parameters, BAR_COLUMN, STEP_COLUMN, "time", "submitted")
            if any(name in row.cells for row in self.rows)
        }
        space = options.max_width - LEAST
        for name in LEFT_OUT:
            if name in columns and _width(columns) > space:
                del columns[name]
        beside = _width(columns) <= space
        shown = len(self.rows) if self.most is None or len(self.rows) <= self.most else max(1, self.most - 1)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in columns:
            table.add_column(_title(name), no_wrap=True)
        if beside:
            table.add_column()
        for at, row in enumerate(self.rows[:shown]):
            table.add_row(*(cells[at] for cells in columns.values()), *([Text(row.details)] if beside else ()))
        if shown < len(self.rows):
            table.add_row(f"and {len(self.rows) - shown} more")
        yield table
        for row in () if beside else self.rows[:shown]:
            if row.details:
                yield Text(f"{row.cells['run']}: {row.details}".lstrip())


def status_table(
    runs: Sequence[Run], each_task: bool, most: int | None = None, about: Sequence[str] = ()
) -> StatusTable:
    """Return a table with one row per run.

    each_task: whether each task of a sweep has a row too.
    most: how many rows to print at most; None: all.
    about: what the user typed for each run.
    """
    texts = about or [""] * len(runs)
    each = zip(runs, texts, strict=True)
    return StatusTable([row for run, text in each for row in _rows(run, each_task, most is None, text)], most)


def _title(name: str) -> str:
    return "" if name in (BAR_COLUMN, STEP_COLUMN) else plain(name.removeprefix("="))


def _width(columns: Mapping[str, Sequence[Text | ProgressBar]]) -> int:
    """Return the width of the columns in characters, including two spaces after each."""
    return sum(
        2 + max(cell_len(_title(name)), *(BAR if isinstance(cell, ProgressBar) else cell.cell_len for cell in cells))
        for name, cells in columns.items()
    )


def _rows(run: Run, each_task: bool, in_order: bool, about: str) -> Iterator[_Row]:
    if run.now:
        yield _row(run.name, run.path, run.now, run.task, [reasons.explain(run.now.reason), about])
    elif run.tasks:
        over = sum(task.state.over for task in run.tasks)
        cells = {"run": run.path.name, "job": job_of(run), "state": counted(len(run.tasks), "task")}
        bar = ProgressBar(total=len(run.tasks), completed=over, width=BAR)
        texts = {name: Text(plain(text)) for name, text in cells.items()}
        yield _Row({**texts, BAR_COLUMN: bar}, find_runs.count_states(run.tasks))
        if each_task:
            for task in run.tasks if in_order else sorted(run.tasks, key=_interest):
                yield _row(f"  {task.number}", task.path, task.state, task)


def _row(name: str, path: Path, now: State, task: find_runs.Task | None, more: Sequence[str] = ()) -> _Row:
    document = progress.read(path) if now.name not in ("PENDING", find_runs.NOT_SUBMITTED) else {}
    cells: dict[str, Text | ProgressBar] = {
        "run": Text(plain(name)),
        "job": Text(plain(now.job_id)),
        "state": Text(now.name, STYLES.get(now.name, "red" if now.over else "")),
    }
    if document:
        cells[BAR_COLUMN] = ProgressBar(total=max(document["total"], 1), completed=document["step"], width=BAR)
        cells[STEP_COLUMN] = Text(f"{document['step']}/{document['total']}")
    for title, text in (("time", times_alone(now)), ("submitted", submitted(path).removeprefix("submitted "))):
        if text:
            cells[title] = Text(text)
    values = parameters(task) if task else {}
    cells |= {f"={name}": Text(plain(value)) for name, value in values.items()}
    unnamed = task.combination if task and not values else ""
    texts = (again(task) if task else "", details(path, now, table=True), unnamed, *more)
    return _Row(cells, plain("  ".join(filter(None, texts))))


def _interest(task: find_runs.Task) -> int:
    """Return a sort key that puts running tasks first, then failed, waiting and successful ones."""
    if not task.state.over:
        return 2 if task.state.name in ("PENDING", find_runs.NOT_SUBMITTED) else 0
    return 1 if task.state.status else 3
