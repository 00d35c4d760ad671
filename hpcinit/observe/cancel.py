"""`hpcinit cancel RUN ...`: cancels runs. On Slurm, it calls scancel once per cluster."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcinit.base import console, json_output, safe_files
from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted
from hpcinit.engine import Engine
from hpcinit.observe import find_runs, overview
from hpcinit.records import job_record, run_folder


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit cancel", description="Cancel runs.")
    parser.add_argument("run", nargs="+", help="run folder, its name, or a job id")
    find_runs.add_runs_dir(parser)
    parser.add_argument(
        "--save",
        action="store_true",
        help="request that the program save a checkpoint and exit (run.should_stop() then returns a reason)",
    )
    return console.add_verbosity_options(parser, "one JSON object per line, for each run")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    paths = list(dict.fromkeys(find_runs.find_run(word, options.runs_dir) for word in options.run))
    runs = overview.read(paths)
    for run in runs:
        _check(run, options.save)
    open_jobs = {run.path: _jobs(run) for run in runs}
    if not options.save:
        cancel(runs, open_jobs)
    for run in runs:
        if options.save and open_jobs[run.path]:
            _request_save(run)
        outcome = _outcome(run, open_jobs[run.path], options.save)
        if options.json:
            jobs = open_jobs[run.path]
            fields = {"run": str(run.path), "jobs": jobs, "save": options.save, "over": not jobs}
            print(json_output.line("cancel", fields))
        elif not options.quiet:
            print(f"{run.path.name}: {outcome}")
        if missing := [task for task in run.tasks if task.state.name == find_runs.NOT_SUBMITTED]:
            tasks = counted(len(missing), "task")
            console.always(
                f"hpcinit: warning: {run.path.name} has {tasks} without a recorded job. If hpcinit was killed during "
                f"their submission, a job may exist. {job_record.how_to_find(run.path)}"
            )
    return 0


def _check(run: overview.Run, save: bool) -> None:
    """Raise RequestError if the run can't be canceled. Call this for all runs before canceling the first one."""
    if not safe_files.is_own(folder := os.path.realpath(run.path)):
        # The files in another user's folder may name any job or process of this user.
        owner = safe_files.user(Path(folder).stat().st_uid)
        raise RequestError(
            f"{run.path} belongs to {owner}: only its owner can cancel it. To cancel your own job: scancel JOB"
        )
    if run.error:
        raise run.error
    now = run.now
    if save and now and now.name == "PENDING":
        raise RequestError(
            f"{run.path.name} has not started, so there is nothing to save. To cancel it: "
            f"hpcinit cancel {run.path.name}"
        )
    if not save:
        run.engine.check_cancelable(run.path, [now for _, now in run.parts])


def _jobs(run: overview.Run) -> list[str]:
    """Return the ids of the run's jobs that are not over, as scancel expects them.

    A chain's last job is first, because canceling a job would start the next job of the chain.
    """
    if not run.now:
        return find_runs.open_jobs(run.tasks)
    return [*reversed(run.now.others), *([] if run.now.over or run.now.purged else [run.now.job_id])]


def _outcome(run: overview.Run, jobs: Sequence[str], save: bool) -> str:
    if not jobs and run.now and run.now.purged:
        return f"has no job to cancel: {run.now.reason}"
    if not jobs:
        return f"has already ended: {run.now.name if run.now else find_runs.count_states(run.tasks)}"
    if save:
        waiting = sum(now.name == "PENDING" for _, now in run.parts)
        left = f"; {counted(waiting, 'task')} not started yet: to cancel the waiting tasks, use hpcinit cancel"
        rest = left * bool(run.tasks and waiting)
        return f"will save and exit at its next run.should_stop(); a program that never calls it continues{rest}"
    return _canceled(jobs)


def _canceled(jobs: Sequence[str]) -> str:
    return (
        f"job {jobs[0]} is being canceled"
        if len(jobs) == 1
        else f"jobs {', '.join(sorted(jobs, key=_number))} are being canceled"
    )


def _number(job: str) -> tuple[int, ...]:
    """Return the numbers in a job id, as a sort key that puts job 9 before job 10."""
    return tuple(int(part) for part in job.split("_") if part.isdigit())


def _request_save(run: overview.Run) -> None:
    for path, now in run.parts:
        if not now.over and now.name != "PENDING":
            (path / run_folder.STOP).touch()


def cancel(runs: Sequence[overview.Run], open_jobs: Mapping[Path, Sequence[str]]) -> None:
    """Cancel jobs, and record the cancellation in the run folders. Raise Failure if a job can't be canceled.

    open_jobs: the job ids to cancel, for each run folder.
    """
    jobs: dict[Engine, dict[Path, Sequence[str]]] = {}
    for run in runs:
        jobs.setdefault(run.engine, {})[run.path] = open_jobs[run.path]
    for engine, its in jobs.items():
        engine.cancel(its)
    for path, now in (part for run in runs if run.engine.has_queue for part in run.parts):
        if now.others or not (now.over or now.purged):
            _record(path, [now.job_id, *now.others])


def _record(path: Path, jobs: Sequence[str]) -> None:
    """Record in the run folder `path` that its jobs were canceled.

    `hpcinit status` needs this record, because Slurm without accounting forgets a job that never started.
    """
    (path / run_folder.CANCELLED).write_text(json.dumps({"jobs": list(jobs), "time": time.time()}) + "\n")
