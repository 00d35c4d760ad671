"""Finds out whether a run will continue automatically: by a requeue, a later job of its chain, or a dependent job.

hpcinit checks this before it advises to submit a run again, because two jobs must not save into the same checkpoint
folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hpcinit.observe import find_runs, state
from hpcinit.records import job_record, run_folder

RESTARTS_ALONE = "it restarts automatically, from its last checkpoint if the program saved one"
_DEPENDENCY = re.compile(r"^#SBATCH --dependency=(.*)$", re.MULTILINE)


def continues(path: Path, now: state.State) -> str:
    """Return a sentence about what will continue the run, such as a restart, or '' if nothing will.

    If Slurm does not answer, the sentence explains that this is unknown.

    now: the state of the run in `path`.
    """
    if now.requeued:
        return RESTARTS_ALONE
    if now.away:
        return f"unknown: Slurm does not answer, and the job may still run or restart; wait, then {_look(path)}"
    if not now.over and not now.purged:
        return f"job {now.job_id} is still in the queue ({now.name}), and Slurm may restart it; later {_look(path)}"
    if now.others:  # the record shows that the chain is finished, so these jobs run nothing (submit/lib/chain.sh)
        jobs = ", ".join(now.others)
        return f"the chain has ended, so its jobs in the queue ({jobs}) will run nothing: hpcinit cancel {path.name}"
    return "; ".join(_dependents(path, now)) if now.engine.has_queue else ""


def _look(path: Path) -> str:
    return f"see hpcinit status {path.name}"


def _dependents(path: Path, now: state.State) -> Iterator[str]:
    """Yield a sentence for each unfinished run in the same folder whose job was submitted to start after this run."""
    # Slurm drops a dependency when it is fulfilled, but the batch script still contains it.
    jobs = {job.partition("_")[0] for job in (now.job_id, *job_record.jobs(job_record.last_submission(path)))}
    waits_for = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, jobs))})(?![\d-])")
    here = path.absolute()
    here = here.parent if find_runs.is_sweep(here.parent) else here
    runs = [run for run in find_runs.all_runs(here.parent) if run.name != here.name]
    found = [run for run in runs if any(waits_for.search(text) for text in _DEPENDENCY.findall(_script(run)))]
    for run, its in zip(found, state.read_all(found), strict=True):
        if isinstance(its, state.State) and not its.over and not its.purged:
            yield f"job {its.job_id} ({run.name}) was submitted to follow this run, and is {its.name}: {_look(run)}"


def _script(run: Path) -> str:
    """Return the first part of the run's batch script, with its #SBATCH options, or '' if it can't be read."""
    try:
        with (run / run_folder.SCRIPT).open(encoding="utf-8", errors="replace") as file:
            return file.read(1 << 14)
    except OSError:
        return ""
