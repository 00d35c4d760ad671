"""`hpcinit cancel RUN ...`: end runs, on Slurm with one scancel for all."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from hpcinit.base import console
from hpcinit.base.errors import Failure, RequestError
from hpcinit.observe import find_runs, overview
from hpcinit.records import run_folder
from hpcinit.slurm import slurm_client


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit cancel", description="End runs.")
    parser.add_argument("run", nargs="+", help="run folder, its name, or a job id")
    find_runs.add_runs_dir(parser)
    parser.add_argument(
        "--save", action="store_true", help="ask the training to save and end by itself: run.should_stop()"
    )
    return console.add_verbosity_options(parser, "one JSON object per line, for each run")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    paths = list(dict.fromkeys(find_runs.find_run(word, options.runs_dir) for word in options.run))
    runs = overview.read(paths)
    for run in runs:
        _check(run, options.save)
    ending = {run.path: _jobs(run) for run in runs}
    if not options.save:
        _end(runs, [job for jobs in ending.values() for job in jobs])
    for run in runs:
        if options.save and ending[run.path]:
            _ask(run)
        done = _done(run, ending[run.path], options.save)
        if options.json:
            about = {"run": str(run.path), "jobs": ending[run.path], "save": options.save}
            print(json.dumps({**about, "over": not ending[run.path]}))
        elif not options.quiet:
            print(f"{run.path.name}: {done}")
    return 0


def _check(run: overview.Run, save: bool) -> None:
    """Before anything is done to any of them. Raises RequestError."""
    if run.error:
        raise run.error
    now = run.now
    if save and now and now.name == "PENDING":
        raise RequestError(f"{run.path.name} has not started, there is nothing to save: hpcinit cancel {run.path.name}")
    if not save and now and now.engine == "local" and now.by_hand and not now.over:
        raise RequestError(f"{run.path.name} was started by hand as process {now.job_id}: end it there, with Ctrl-C")


def _jobs(run: overview.Run) -> list[str]:
    """What is not over of it, as scancel takes it; of a chain the last first, since the next begins as one ends."""
    if not run.now:
        return find_runs.open_jobs(run.tasks)
    return [*reversed(run.now.others), *([] if run.now.over else [run.now.job_id])]


def _done(run: overview.Run, jobs: Sequence[str], save: bool) -> str:
    if not jobs:
        return f"was over already, {run.now.name if run.now else find_runs.count_states(run.tasks)}"
    if save:
        waiting = sum(now.name == "PENDING" for _, now in run.parts)
        rest = f"; {waiting} tasks have not started, hpcinit cancel ends them" * bool(run.tasks and waiting)
        return f"asked to save and end; a training that never calls run.should_stop() goes on{rest}"
    return (
        f"job {jobs[0]} is being cancelled"
        if len(jobs) == 1
        else f"jobs {', '.join(sorted(jobs, key=_number))} are being cancelled"
    )


def _number(job: str) -> tuple[int, ...]:
    """In the order of their submission: 9 before 10."""
    return tuple(int(part) for part in job.split("_") if part.isdigit())


def _ask(run: overview.Run) -> None:
    for path, now in run.parts:
        if not now.over and now.name != "PENDING":
            (path / run_folder.STOP).touch()


def _end(runs: Sequence[overview.Run], jobs: Sequence[str]) -> None:
    from hpcinit.local import engine  # noqa: PLC0415 - psutil, only where there is no Slurm

    local = [run for run in runs if run.now and run.now.engine == "local"]
    for run in local:
        if run.now and not run.now.over:
            engine.cancel(run.path)
    ids = {run.now.job_id for run in local if run.now}
    if slurms := [job for job in jobs if job not in ids]:
        _scancel(slurms)
    for run in runs:
        for path, now in run.parts:
            if run not in local and (now.others or not now.over):
                _note(path, [now.job_id, *now.others])


def _note(path: Path, jobs: Sequence[str]) -> None:
    """For status: of a job that is cancelled before it begins nothing stays, where there is no accounting."""
    (path / run_folder.CANCELLED).write_text(json.dumps({"jobs": list(jobs), "time": time.time()}) + "\n")


def _scancel(jobs: Sequence[str]) -> None:
    command = ["scancel", *jobs]
    try:
        done = slurm_client.run(command)
    except slurm_client.NotStarted as error:
        raise Failure(f"{error}: cancel where the job was submitted") from None
    except slurm_client.TimedOut as error:
        raise Failure(f"{error}; try again when `squeue` answers") from None
    if done.status != 0:
        raise Failure(f"{' '.join(command)}: {done.stderr.strip()}")
