"""`hpcinit report RUN [--json] [--html FILE]`: print how long each phase of start-up took, and which ranks were
slow."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcinit.base import console as console_module
from hpcinit.base.console import plain
from hpcinit.base.errors import Failure, HpcinitError, RequestError
from hpcinit.base.text import ranges
from hpcinit.observe import find_runs, state
from hpcinit.records import run_folder, spec, timeline
from hpcinit.records.timeline import Attempt
from hpcinit.report import page, startup_phases
from hpcinit.report.startup_phases import Report

TASK = "task"


def gather_reports(run: Path) -> list[Report]:
    """Return a report for each attempt, the first one first. Raise RequestError if no rank wrote a timeline."""
    attempts = timeline.read(run)
    if not attempts:
        record = state.submission(run)
        raise RequestError(
            f"no start-up timeline in {run / run_folder.TIMELINE}: job {record['job_id']} has not started yet, its "
            f"ranks could not write there (see hpcinit why), or an older hpcinit submitted it"
        )
    submissions = dict(_submission_times(run))
    seen: set[str] = set()
    found = []
    for attempt in attempts:
        key = _job_and_restart(attempt)
        key = key if key in submissions else f"{TASK}.{attempt.restart}"
        submitted = (
            None if key in seen else submissions.get(key)
        )  # ranks that restart inside a job did not wait in the queue
        seen.add(key)
        found.append(startup_phases.startup_phases(_with_timeout(_with_submission(attempt, submitted), run)))
    return found


def _job_and_restart(attempt: Attempt) -> str:
    return f"{attempt.job.partition('.')[0].partition('+')[0]}.{attempt.restart}"


def _with_submission(attempt: Attempt, submitted: float | None) -> Attempt:
    """Return `attempt` with the time of submission.

    A job may start before its submission is recorded: it is then shown without a queue time. Slurm 24.11 gives the
    start in whole seconds (SLURM_JOB_START_TIME), so it may appear to be before the submission.
    """
    if submitted is None:
        return attempt
    ranks = []
    for rank in attempt.ranks:
        at = rank.events.get("allocated", 0.0)
        events = {"submitted": min(submitted, at), **rank.events}
        ranks.append(replace(rank, events=events) if int(submitted) <= at else rank)
    return replace(attempt, ranks=tuple(ranks))


def _with_timeout(attempt: Attempt, run: Path) -> Attempt:
    """Return `attempt` with a timeout. If rank 0 recorded none, compute it from the spec, without the job's time
    limit."""
    if attempt.formula:
        return attempt
    try:
        formula = spec.load(run / run_folder.SPEC, to_run=False).comm.timeout
        limit, text = formula.start_up(attempt.nodes).total_seconds(), formula.text(attempt.nodes)
    except HpcinitError:
        return attempt
    return replace(attempt, timeout_s=limit, formula=f"{text} (from the spec: rank 0 did not record it)")


def _submission_times(run: Path) -> Iterator[tuple[str, float]]:
    """Yield ('JOB.RESTART', time of its submission or requeue in seconds since 1970)."""
    with contextlib.suppress(RequestError, KeyError, TypeError, ValueError):
        record = state.submission(run)
        at = float(record["submitted"])
        yield from ((f"{_number(job)}.0", at) for job in state.jobs(record))
    for line in _lines(run / run_folder.RESTARTS):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            yield f"{_number(line['job'])}.{int(line['restart'])}", float(line["time"])


def _number(job: str) -> str:
    """Return the job id, or TASK for an array task ('18_1'): only its ranks know its own number."""
    return TASK if "_" in job else job


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                yield document


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit report", description="Show how long each phase of start-up took, and which ranks were slow."
    )
    parser.add_argument("run", nargs="?", default="", help="run folder, its name, or a job id")
    find_runs.add_runs_dir(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help=f"file for the HTML page; default: RUN/{run_folder.REPORT}"
    )
    return console_module.add_verbosity_options(parser, "one JSON object; no HTML page without --html")


def main(argv: Sequence[str]) -> int:
    options = console_module.parse_arguments(parser(), list(argv))
    path = find_runs.find_run(options.run, options.runs_dir)
    if find_runs.is_sweep(path):
        numbers = ranges(find_runs.combinations(path))
        raise RequestError(f"{path} is a sweep with the tasks {numbers}: name one task, hpcinit report {options.run}/0")
    found = gather_reports(path)
    if options.json:
        print(json.dumps({"run": str(path), "attempts": [page.document(report) for report in found]}))
    else:
        _print(found)
    if options.html or not options.json:
        _write(
            options.html or path / run_folder.REPORT,
            path,
            found,
            requested=options.html is not None,
            beside_json=options.json,
        )
    return 0


def _print(found: Sequence[Report]) -> None:
    if console_module.quiet():
        for report in found:
            print(plain(page.headline(report)))
        return
    if not sys.stdout.isatty():
        for report in found:
            print(plain("\n".join(page.report_lines(report))))
        return
    from rich.console import Console  # noqa: PLC0415 - for a terminal only

    console = Console(highlight=False)
    for report in found:
        console.print(plain(page.headline(report)), style="bold", markup=False)
        console.print(page.terminal_table(report))
        for line in page.notes(report):
            console.print(plain(line), markup=False)


def _write(file: Path, run: Path, found: Sequence[Report], requested: bool, beside_json: bool) -> None:
    """Write the HTML page. Another user's run folder may be read-only: that is an error only with --html."""
    try:
        file.write_text(page.render_html(run, found, file), encoding="utf-8")
    except OSError as error:
        problem = f"cannot write the page {file}: {error.strerror}"
        if requested:
            raise Failure(f"{problem}; choose another file with --html FILE") from None
        console_module.message(f"{problem}; choose another file with --html FILE")
    else:
        if beside_json:
            console_module.note(f"page: {file}")
        elif not console_module.quiet():
            print(f"page: {file}")
