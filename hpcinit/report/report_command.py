"""`hpcinit report RUN | JOB | FOLDER | --since 30d`: how runs used the charged time, and how they started."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpcinit.base import console as console_module
from hpcinit.base import json_output
from hpcinit.base.console import plain
from hpcinit.base.errors import RequestError
from hpcinit.engine import from_record
from hpcinit.observe import find_runs
from hpcinit.records import job_record, run_folder
from hpcinit.report import advice, charges, ledger, pictures, read_run, startup_table
from hpcinit.report.ledger import Allocation, Amount, Ledger, Start

DURATION = re.compile(r"(\d+)([hdw])")
HOURS = {"h": 1, "d": 24, "w": 168}
MOST_STARTS = 3  # most start-up tables in the text; the JSON document contains all
MOST_RUNS = 15  # most runs that --since lists


def document(found: Ledger) -> dict[str, Any]:
    """Return the ledger as a JSON document. Its seconds are wall-clock time. Multiply them by `gpus` to get
    GPU-seconds.
    """
    loss = advice.largest(found)
    unit_s = found.unit_s / found.charged_s if found.charged_s else 1.0
    return {
        "run": found.name,
        "charged_s": round(found.charged_s, 3),
        "gpus": round(found.gpus, 6),
        "unit": found.unit,
        "charged_hours": found.unit_s / 3600,
        "rows": [
            _row(ledger.QUEUE, Amount(*([found.queued_s] * 3))),
            *(_row(row, Amount().plus(amount, 1 / unit_s)) for row, amount in found.rows.items()),
        ],
        "largest_loss": {"row": loss.row, "hours": loss.unit_s / 3600, "text": loss.text} if loss else None,
        "nodes_at_fault": list(advice.by_node(found)),
        "attempts": [attempt for one in found.allocations for attempt in _attempts(one)],
    }


def _row(row: str, amount: Amount) -> dict[str, Any]:
    low, high = (round(value, 3) for value in amount[1:])
    return {"name": row, "seconds": round(amount.at, 3), "low_s": low, "high_s": high}


def _attempts(one: Allocation) -> Iterator[dict[str, Any]]:
    """Yield a JSON document for each start in the allocation: its rows of the charged time, and its start-up."""
    for start in one.starts or (Start(()),):
        alone = replace(one, starts=(start,))
        if len(one.starts) > 1:
            alone = replace(alone, begin=start.segments[0].begin.at, end=start.segments[-1].end.at)
        yield {
            "job": f"{one.job}.0.{one.restart}",
            "start": alone.begin,
            "end": alone.end,
            "charged_s": round(alone.charged_s, 3),
            "queued_s": one.queued_s if start is (one.starts or (start,))[0] else 0.0,
            "nodes": one.nodes,
            "gpus": one.gpus,
            "state": one.state,
            "reason": one.reason,
            "rows": [_row(row, amount) for row, amount in alone.rows.items()],
            **(startup_table.document(start.report) if start.report else {}),
        }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit report",
        description="Show where the charged time of a run went, what to change, and how each start went. RUN may also "
        "be a job that hpcinit did not submit, or a folder with its logs.",
    )
    parser.add_argument("run", nargs="?", default="", help="run folder, its name, a job id, or a folder with logs")
    parser.add_argument("--since", metavar="TIME", help="all runs submitted in the last TIME: 12h, 30d, 8w")
    parser.add_argument("--csv", action="store_true", help="print the rows of each attempt as CSV")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="also write the ledger to this file as an SVG picture")
    find_runs.add_runs_dir(parser)
    return console_module.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    options = console_module.parse_arguments(parser(), list(argv))
    if options.since and options.run:
        raise RequestError(
            f"--since {options.since} reports on all runs, so it cannot be combined with {options.run!r}: remove one "
            "of them"
        )
    found = _since(options.since, options.runs_dir) if options.since else [_one(options.run, options.runs_dir)]
    whole = found[0] if len(found) == 1 and not options.since else _together(found, f"runs of {options.since}")
    if options.svg:
        try:
            options.svg.write_text(pictures.svg(whole), encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{options.svg} cannot be written: {error.strerror}") from None
    if options.json:
        more = {"runs": [{"run": one.name, **_short(one)} for one in found]} if options.since else {}
        print(json_output.line("report", {**document(whole), **more}))
    elif options.csv:
        print(pictures.csv_text(found), end="")
    elif options.since:
        _print(pictures.lines(whole), ["", *_run_lines(found)])
    else:
        _print_one(whole)
    return 0


def _short(one: Ledger) -> dict[str, Any]:
    rows = {row: round(amount.at / 3600, 6) for row, amount in one.rows.items()}
    return {"charged_hours": one.unit_s / 3600, "unit": one.unit, "hours": rows}


def _together(found: Sequence[Ledger], name: str) -> Ledger:
    every = sorted((one for each in found for one in each.allocations), key=lambda one: one.begin)
    return Ledger(name, tuple(every))


def _one(word: str, runs_dir: Path) -> Ledger:
    """Return the ledger of a run, of a sweep, or of a job that hpcinit did not submit.

    `word` is a run's name, folder or job id, or the path of a job's logs. Raise RequestError if it is none of these.
    """
    from hpcinit.report import read_job  # noqa: PLC0415 - only for jobs that hpcinit did not submit

    if (foreign := read_job.find(word)) is not None:
        return foreign
    try:
        path = find_runs.find_run(word, runs_dir)
    except RequestError:
        if (foreign := read_job.of_slurm(word)) is not None:
            return foreign
        raise
    if find_runs.is_sweep(path):
        tasks = find_runs.task_folders(path, find_runs.combinations(path))
        found = _together(list(_ledgers(tasks)), str(path))
        if not found.allocations:
            raise RequestError(f"no task of the sweep {path} has started")
        return found
    found = Ledger(str(path), tuple(read_run.read(path)))
    if not found.allocations:
        record = job_record.submission(path)
        raise RequestError(
            f"{path / run_folder.TIMELINE} contains no start-up timeline, so there is nothing to report. Possible "
            f"reasons: job {record['job_id']} has not started, its ranks could not write to this folder (check with: "
            f"hpcinit why {path.name}), or an old version of hpcinit submitted the run"
        )
    return found


def _since(text: str, runs_dir: Path) -> list[Ledger]:
    match = DURATION.fullmatch(text)
    if not match:
        raise RequestError(f"--since {text}: expected a number with h, d or w: 12h, 30d, 8w")
    after = time.time() - timedelta(hours=int(match[1]) * HOURS[match[2]]).total_seconds()
    paths = [path for path in find_runs.all_runs(runs_dir) if (path / run_folder.SUBMISSION).stat().st_mtime >= after]
    tasks = [
        task
        for path in paths
        for task in (
            find_runs.task_folders(path, find_runs.combinations(path)) if find_runs.is_sweep(path) else (path,)
        )
    ]
    found = [one for one in _ledgers(tasks) if one.allocations]
    if not found:
        raise RequestError(f"nothing to report: no run of the last {text} in {runs_dir.absolute()} has started")
    return found


def _ledgers(paths: Sequence[Path]) -> Iterator[Ledger]:
    """Yield the ledger of each run. Query sacct once for the jobs of all runs. Skip folders that are not runs."""
    jobs: set[str] = set()
    for path in paths:
        with suppress(RequestError):
            record = job_record.submission(path)
            jobs.update(job_record.jobs(record) if from_record(record).uses_slurm else ())
    known: dict[str, list[Allocation]] = {}
    for one in charges.of_jobs(sorted(jobs)) if jobs else ():
        known.setdefault(one.job, []).append(one)
    for path in paths:
        with suppress(RequestError):
            yield Ledger(find_runs.name_of(path), tuple(read_run.read(path, known)))


def _run_lines(found: Sequence[Ledger]) -> Iterator[str]:
    """Yield a line for each run, starting with the run that has the most charged time."""
    for one in sorted(found, key=lambda one: -one.unit_s)[:MOST_RUNS]:
        loss = advice.largest(one)
        lost = f", largest loss: {pictures.percent(one, loss.row)} {ledger.TITLES[loss.row]}" if loss else ""
        yield f"  {one.name}: {advice.hours(one.unit_s)} {one.unit}, {pictures.percent(one, ledger.KEPT)} kept{lost}"
    if len(found) > MOST_RUNS:
        yield f"  and {len(found) - MOST_RUNS} more runs: --csv lists all"


def _print(*parts: Sequence[str] | Iterator[str]) -> None:
    for lines in parts:
        for line in lines:
            print(plain(line))


def _print_one(found: Ledger) -> None:
    reports = [start.report for one in found.allocations for start in one.starts if start.report]
    if console_module.quiet():
        _print([pictures.headline(found), *map(startup_table.headline, reports)])
        return
    _print(pictures.lines(found), pictures.attempt_lines(found))
    if len(reports) > MOST_STARTS:
        print(f"\nstart-up of the last of {len(reports)} attempts (for all of them: --json)")
        reports = reports[-1:]
    for report in reports:
        _print([""], startup_table.report_lines(report))
