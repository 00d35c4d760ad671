"""`hpcinit status [RUN ...|all] [--json]`: a line per run; without RUN all of ./runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from hpcinit.facts import telling
from hpcinit.facts.terminal import plain
from hpcinit.observe import find, overview, view


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit status", description="How runs are doing.")
    parser.add_argument("run", nargs="*", help="run folder, its name, a job id, or all; default: all")
    find.add_runs_dir(parser)
    return telling.options(parser, "one JSON object per line, for programs")


def main(argv: Sequence[str]) -> int:
    options = telling.parsed(parser(), list(argv))
    every = find.means_all(options.run)
    runs = overview.read(find.meant(options.run, options.runs_dir))
    for run in runs:
        if run.error and not every:
            raise run.error
        if run.error:  # one odd folder must not hide the others
            telling.note(f"{run.path.name:24} {run.error}")
    known = [run for run in runs if not run.error]
    if options.json:
        for run in known:
            for document in view.documents(run):
                print(json.dumps(document))
    elif options.quiet:
        for run in known:
            print(plain("\n".join(view.shortest(run))))
    elif sys.stdout.isatty():
        _table(known, each_task=not every)
    else:
        for run in known:
            for line in view.lines(run, each_task=not every):
                print(plain(line))
    return 0


def _table(runs: Sequence[overview.Run], each_task: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - for a terminal only

    from hpcinit.observe import table  # noqa: PLC0415

    Console(highlight=False).print(table.of(runs, each_task))
    for run in runs if each_task else ():
        for text in view.meanings(run) if run.tasks else ():
            print(plain(text))
