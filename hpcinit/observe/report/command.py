"""`hpcinit report RUN [--json] [--html FILE]`: how long each phase of a start took, and who was slow."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcinit.facts import runfolder, telling
from hpcinit.facts.errors import Failure, RequestError
from hpcinit.facts.ranges import ranges
from hpcinit.facts.terminal import plain
from hpcinit.observe import find, sweep
from hpcinit.observe.report import gather, page, text
from hpcinit.observe.report.phases import Report


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit report", description="How a run's ranks came up: who was slow.")
    parser.add_argument("run", nargs="?", default="", help="run folder, its name, or a job id")
    find.add_runs_dir(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help=f"where the page goes; default: RUN/{runfolder.REPORT}"
    )
    return telling.options(parser, "one JSON object, for programs; no page unless --html")


def main(argv: Sequence[str]) -> int:
    options = telling.parsed(parser(), list(argv))
    path = find.find(options.run, options.runs_dir)
    if sweep.is_sweep(path):
        numbers = ranges(sweep.combinations(path))
        raise RequestError(f"{path} is a sweep of the tasks {numbers}, expected one: hpcinit report {options.run}/0")
    found = gather.reports(path)
    if options.json:
        print(json.dumps({"run": str(path), "attempts": [text.document(report) for report in found]}))
    else:
        _print(found)
    if options.html or not options.json:
        _write(
            options.html or path / runfolder.REPORT,
            path,
            found,
            asked=options.html is not None,
            beside_json=options.json,
        )
    return 0


def _print(found: Sequence[Report]) -> None:
    if telling.quiet():
        for report in found:
            print(plain(text.headline(report)))
        return
    if not sys.stdout.isatty():
        for report in found:
            print(plain("\n".join(text.lines(report))))
        return
    from rich.console import Console  # noqa: PLC0415 - for a terminal only

    console = Console(highlight=False)
    for report in found:
        console.print(plain(text.headline(report)), style="bold", markup=False)
        console.print(text.table(report))
        for line in text.notes(report):
            console.print(plain(line), markup=False)


def _write(file: Path, run: Path, found: Sequence[Report], asked: bool, beside_json: bool) -> None:
    """Another user's run can be read and not written: that matters only where a page was asked for."""
    try:
        file.write_text(page.render(run, found, file), encoding="utf-8")
    except OSError as error:
        said = f"the page {file} cannot be written: {error.strerror}"
        if asked:
            raise Failure(f"{said}; choose another place with --html FILE") from None
        telling.message(f"{said}; --html FILE writes it elsewhere")
    else:
        if beside_json:
            telling.note(f"page: {file}")
        elif not telling.quiet():
            print(f"page: {file}")
