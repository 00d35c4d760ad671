"""`hpcinit status [RUN ...] [--json]`: a line per run; without RUN all of ./runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcinit.facts.errors import RequestError
from hpcinit.observe import find, progress, reasons, state, sweep


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hpcinit status", description="How a run is doing.")
    parser.add_argument("run", nargs="*", help="run folder, its name, or a job id; default: all")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(argv)
    paths = [find.find(word, options.runs_dir) for word in options.run] or find.runs(options.runs_dir)
    if not paths:
        raise RequestError(f"no runs in {options.runs_dir.absolute()}; --runs-dir names another folder")
    answers = True  # a controller that is away costs many seconds a question: ask it once
    for path in paths:
        try:
            if sweep.is_sweep(path):
                answers &= _sweep(path, answers, options)
                continue
            now = state.read(path, answers)
            answers &= now.source != state.NOBODY
        except RequestError as error:
            if options.run:
                raise
            print(f"{path.name:24} {error}", file=sys.stderr)  # one odd folder must not hide the others
            continue
        if options.json:
            print(json.dumps({"run": str(path), **now.to_json(), "progress": progress.read(path)}))
            continue
        status = "" if now.exit_status is None else f"exit status {now.exit_status}"
        how = "started by hand" if now.by_hand else ""
        details = "  ".join(text for text in (how, now.link, now.reason, status, progress.line(path)) if text)
        print(f"{path.name:24} {now.job_id:>9}  {now.name:10} {details}".rstrip())
        if meaning := reasons.explain(now.reason):
            print(f"{'':24} {'':>9}  {meaning}")
    return 0


def _sweep(path: Path, answers: bool, options: argparse.Namespace) -> bool:
    """A line for a sweep, and if it is asked for by name one for each task. False: Slurm does not answer."""
    tasks = sweep.read(path, answers)
    if options.json:
        for task in tasks:
            about = {"run": str(task.path), "task": task.number, "combination": task.combination}
            print(json.dumps({**about, **task.state.to_json(), "progress": progress.read(task.path)}))
    else:
        jobs = [job for job in dict.fromkeys(task.state.job_id.partition("_")[0] for task in tasks) if job != "-"]
        print(f"{path.name:24} {jobs[0] if jobs else '-':>9}  {len(tasks)} tasks: {sweep.counts(tasks)}")
        if options.run:
            print(*sweep.lines(tasks), sep="\n")
    return all(task.state.source != state.NOBODY for task in tasks)
