"""`hpcinit cancel RUN`: end a run, on Slurm with scancel."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpcinit.facts import runfolder
from hpcinit.facts.errors import Failure, RequestError
from hpcinit.local import engine
from hpcinit.observe import find, state, sweep


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hpcinit cancel", description="End a run.")
    parser.add_argument("run", nargs="+", help="run folder, its name, or a job id")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument(
        "--save", action="store_true", help="ask the training to save and end by itself: run.should_stop()"
    )
    options = parser.parse_args(argv)
    for word in options.run:
        path = find.find(word, options.runs_dir)
        if sweep.is_sweep(path):
            _sweep(path)
            continue
        now = state.read(path)
        if now.over and not now.others:
            print(f"{path.name}: was over already, {now.name}")
            continue
        if options.save:
            _ask(path, now)
            print(f"{path.name}: asked to save and end; a training that never calls run.should_stop() goes on")
            continue
        _end(path, now)
        jobs = [*([] if now.over else [now.job_id]), *now.others]
        which = f"job {jobs[0]} is" if len(jobs) == 1 else f"jobs {', '.join(jobs)} are"
        print(f"{path.name}: {which} being cancelled")
    return 0


def _ask(path: Path, now: state.State) -> None:
    if now.name == "PENDING":
        raise RequestError(f"{path.name} has not started, there is nothing to save: hpcinit cancel {path.name}")
    (path / runfolder.STOP).touch()


def _end(path: Path, now: state.State) -> None:
    if now.engine == "local":
        if now.by_hand:
            raise RequestError(f"{path.name} was started by hand as process {now.job_id}: end it there, with Ctrl-C")
        engine.cancel(path)
        return
    # Of a chain the last first: the next would begin as soon as one has ended.
    _scancel([*reversed(now.others), *([] if now.over else [now.job_id])])


def _sweep(path: Path) -> None:
    tasks = sweep.read(path)
    jobs = sweep.open_jobs(tasks)
    if not jobs:
        print(f"{path.name}: was over already, {sweep.counts(tasks)}")
        return
    _scancel(jobs)
    print(f"{path.name}: job{'s' * (len(jobs) > 1)} {', '.join(jobs)} being cancelled")


def _scancel(jobs: Sequence[str]) -> None:
    command = ["scancel", *jobs]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise Failure("scancel is not on PATH: cancel where the job was submitted") from None
    if done.returncode != 0:
        raise Failure(f"{' '.join(command)}: {done.stderr.strip()}")
