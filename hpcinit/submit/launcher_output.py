"""Prints messages for the Hydra launcher: submitted jobs, changes of their states while it waits, and failed jobs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcinit.base.text import counted
from hpcinit.observe import cancel as cancel_command
from hpcinit.observe import find_runs, state, watch
from hpcinit.observe.poll import Polls
from hpcinit.observe.state import State
from hpcinit.records import job_record, results
from hpcinit.why import why_command

Print = Callable[[str], None]


def job_line(number: int, overrides: Sequence[str], about: str) -> str:
    """Return a line about job `number` of the multirun, in the format of Hydra's own launchers."""
    return f"\t#{number} : {' '.join(overrides)} : {about}"


def wait(runs: Sequence[Path], show: Print) -> dict[Path, State]:
    """Wait until the runs have ended, and return their states. Show each change as `hpcinit watch` prints it."""
    polls = Polls(list(dict.fromkeys(run.parent if find_runs.is_sweep(run.parent) else run for run in runs)))
    for line in watch.changes(polls):
        show(line)
    ends = {path: now for run in polls.now for path, now in run.parts}
    # If a task was submitted again meanwhile, Polls has only the newer run.
    return {run: ends.get(run) or state.read(run) for run in runs}


def job_id(run: Path) -> str:
    """Return the job id of the run."""
    return str(job_record.submission(run)["job_id"])


def cancel(runs: Sequence[Path], show: Print) -> None:
    """Cancel the runs. First show how to cancel them manually, in case Slurm does not reply."""
    whole = [str(run.parent if find_runs.is_sweep(run.parent) else run) for run in runs]
    if paths := list(dict.fromkeys(whole)):
        show(f"interrupted. If the jobs do not end:  hpcinit cancel {shlex.join(paths)}")
        cancel_command.main(paths)


def succeeded(run: Path, now: State) -> bool:
    """Return whether the run succeeded. If Slurm has purged the job, the run succeeded if it has a result."""
    return now.name == "COMPLETED" or (now.name == "UNKNOWN" and results.read(run) is not None)


def failure(run: Path, now: State) -> str:
    """Return one line with the run, its state, and the verdict of `hpcinit why`."""
    return f"{run} {now.name}: {why_command.explain_run(run, now).headline}"


def show_failures(lines: Sequence[str], jobs: int, show: Print) -> None:
    """Show which jobs of a batch failed.

    lines: one line per failed job.
    jobs: the number of jobs in the batch.
    """
    if lines:
        show(f"{len(lines)} of {counted(jobs, 'job')} failed. For the evidence:  hpcinit why RUN")
    for line in lines:
        show(line)
