"""Runs a pickled function on each rank, for hpcinit.Executor: `python -m hpcinit.jobs.function NAME`.

The pickle and the result are in the run folder. Without a run, they are in FOLDER, given as `--folder FOLDER`. submitit
loads the function, handles the signals that requeue the job, and writes the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from submitit.core import submission
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment

from hpcinit.base import safe_files
from hpcinit.base.errors import RequestError
from hpcinit.records import run_folder


def main(argv: Sequence[str]) -> None:
    """Run the function of this job. Exceptions that the function raises are not caught.

    Raise RequestError if the pickle belongs to another user.
    """
    folder = argv[1] if argv[:1] == ["--folder"] else os.environ.get(run_folder.ENV_FOLDER)
    if folder is None:
        raise RequestError(
            "hpcinit.jobs.function works only inside a job: submit the function with "
            "hpcinit.Executor(folder).submit(function)"
        )
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"  # for submitit.JobEnvironment, which reads Slurm's variables
    here = SlurmJobEnvironment()
    paths = JobPaths(folder, job_id=here.job_id, task_id=here.global_rank)
    if argv[:1] != ["--folder"]:
        _name_as_submitit(paths)
    if problem := safe_files.pickle_problem(paths.submitted_pickle):
        raise RequestError(problem)
    submission.process_job(folder)


def _name_as_submitit(paths: JobPaths) -> None:
    """Link the pickle and this rank's log to the names that submitit expects, which contain the job id."""
    if not (paths.folder / run_folder.PICKLE).exists():
        raise RequestError(
            f"{paths.folder} contains no {run_folder.PICKLE}, so there is no function to run: submit it again with "
            "hpcinit.Executor"
        )
    log = run_folder.RANK_LOG.format(rank=paths.task_id)
    names = {paths.submitted_pickle: run_folder.PICKLE, paths.stdout: log, paths.stderr: log}
    for link, name in names.items():
        with suppress(FileExistsError):  # another rank created it, or it is the checkpoint of an earlier attempt
            link.symlink_to(name)


if __name__ == "__main__":
    main(sys.argv[1:])
