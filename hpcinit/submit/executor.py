"""Extends submitit's executor for Slurm: each submission makes exactly one job, and Slurm's accounting is not needed.

`hpcinit submit` renders and submits every script with this executor. The differences from submitit 1.5.4 and the
reasons for them are in docs/decisions/0004-submitit-as-renderer.md.
"""

from __future__ import annotations

import copy
import os
import stat
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core import core, utils
from submitit.slurm import slurm

from hpcinit.base import safe_files
from hpcinit.base.errors import RequestError
from hpcinit.base.quoting import shell
from hpcinit.slurm import exactly_once, queue, sbatch, tokens
from hpcinit.slurm.queue import JobQuery
from hpcinit.submit.job_environment import clean_environment

PRIVATE = 0o700  # the mode of a folder with pickles: a pickle's author can run code as the user who loads it
DELAY_S = 30  # the longest time between two queries of Slurm
PURGED_S = 60.0  # a job that Slurm has not known for this long counts as ended


class Watcher(slurm.SlurmInfoWatcher):
    """Queries the states of all jobs at once, with squeue, sacct and scontrol.

    submitit's own watcher only uses sacct. Without accounting, it never detects that a job without a result has ended.
    """

    def __init__(self, delay_s: int = DELAY_S) -> None:
        super().__init__(delay_s)
        self._unknown_since: dict[str, float] = {}  # time.monotonic() of the first reply without the job

    def update(self) -> None:
        """Ask Slurm for the states of the jobs that have not ended. If Slurm doesn't reply, change nothing."""
        open_ = self._registered - self._finished
        if not open_:
            return
        self._num_calls += 1
        states = self._states(sorted(open_))
        self._last_status_check = time.time()
        for job_id, state in states.items():
            if state:
                self._info_dict[job_id] = {"JobID": job_id, "State": state}
                self._unknown_since.pop(job_id, None)
            else:
                self._unknown_since.setdefault(job_id, time.monotonic())
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)

    def _states(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the state of each job, or '' if Slurm does not know it.

        If Slurm does not reply, omit the jobs whose state is unknown.
        """
        reply = queue.query([JobQuery([job_id], job_id) for job_id in ids])
        known = {job_id: reply.jobs[job_id].state for job_id in ids if job_id in reply.jobs}
        return known if reply.unreachable else dict.fromkeys(ids, "") | known

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether the job has a final state, or has been unknown to Slurm for PURGED_S seconds.

        submitit also counts a suspended job as done, but this method does not.
        """
        if self.get_state(job_id, mode=mode) in queue.FINAL:
            return True
        since = self._unknown_since.get(job_id)
        return since is not None and time.monotonic() - since > PURGED_S

    def clear(self) -> None:
        super().clear()
        self._unknown_since = {}


class Job(slurm.SlurmJob[core.R]):
    """A submitit job that uses our Watcher. It only loads pickles that no other user could have written."""

    watcher = Watcher()

    def submission(self) -> utils.DelayedSubmission:
        _require_trusted(self.paths.submitted_pickle)
        return super().submission()

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        _require_trusted(self.paths.result_pickle)
        return super()._get_outcome_and_result()


class Executor(submitit.SlurmExecutor):
    """Renders and submits batch scripts with submitit's parameters.

    program: whether the script starts a program that does not use submitit.
    header: comments for the top of the script.
    """

    job_class = Job

    def __init__(self, folder: Path | str, *args: Any, program: bool = False, header: Sequence[str] = (), **more: Any):
        super().__init__(folder, *args, **more)
        self._program, self._header = program, header
        self._options: Sequence[str] = ()

    @classmethod
    def name(cls) -> str:
        return "slurm"

    @classmethod
    def affinity(cls) -> int:
        """Return the score by which submitit chooses an executor.

        It is at least 1, so that a dry run works without Slurm.
        """
        return max(1, super().affinity())

    def render(self, command: str, **parameters: Any) -> str:
        """Return the batch script that runs `command`.

        parameters: parameters of submitit.
        """
        self.update_parameters(**parameters)
        return self._make_submission_file_text(command, "")

    def submit_script(
        self, script: Path, env: Mapping[str, str], token: str, options: Sequence[str] = (), **how: Any
    ) -> tuple[str, Sequence[str]]:
        """Submit `script` so that there is exactly one job. Return the job id and the sbatch command.

        The arguments are those of exactly_once.submit.
        """
        return exactly_once.submit(script, env, token, options, attempt=self._attempt, **how)

    def _attempt(self, script: Path, env: Mapping[str, str], options: Sequence[str]) -> tuple[str, Sequence[str]]:
        self._options = options
        command = self._make_submission_command(script)
        return self._get_job_id_from_submission_command(sbatch.reply(command, env)), command

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -u -m hpcinit.jobs.function --folder {shell(str(self.folder))}"

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text = super()._make_submission_file_text(command, uid)
        if self._program:
            # With this line, submitit.JobEnvironment() would return Slurm's task numbers instead of torchrun's ranks.
            text = text.replace("\n# command\nexport SUBMITIT_EXECUTOR=slurm\n", "\n# command\n", 1)
        first, *lines = text.split("\n")
        if self._program and "signal" not in (self.parameters.get("additional_parameters") or {}):
            # submitit always requests USR2, which kills every program that does not handle it.
            lines = [line for line in lines if not line.startswith("#SBATCH --signal=")]
        return "\n".join([first, *self._header, *lines])

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*sbatch.COMMAND, *self._options, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return sbatch.job_id(string if isinstance(string, str) else string.decode(errors="replace"))

    def _submit_command(self, command: str) -> core.Job[Any]:
        """Submit a script that runs `command`, so that there is exactly one job.

        submitit's own method calls sbatch once, and does not find the job if sbatch's reply is lost.
        """
        uid = uuid.uuid4().hex
        script = _folder(self.folder) / f".submission_file_{uid}.sh"
        script.write_text(self._make_submission_file_text(command, uid))
        env, _ = clean_environment(os.environ)
        comment = self.parameters.get("comment")
        job_id, _ = self.submit_script(script, env, tokens.new(), comment=comment)
        job: core.Job[Any] = self.job_class(self.folder, job_id, list(range(self._num_tasks())))
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        self._set_job_permissions(job.paths.folder)
        return job

    @staticmethod
    def _set_job_permissions(folder: Path) -> None:
        folder.chmod(PRIVATE)

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """Submit one function as a job, or several functions as a job array.

        submitit's own method would submit an array with a plain SlurmExecutor instead of this class.
        """
        folder = _folder(self.folder)
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if folder == self.folder:
            _refuse_shared(folder)  # now, because _set_job_permissions changes the folder's mode after the submission
        if len(delayed_submissions) == 1:
            return super()._internal_process_submissions(delayed_submissions)
        pickles = [folder / f"{uuid.uuid4().hex}.pkl" for _ in delayed_submissions]
        for each, pickle in zip(delayed_submissions, pickles, strict=True):
            each.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            each.dump(pickle)
        array = copy.copy(self)
        array.parameters = {**self.parameters, "map_count": len(delayed_submissions)}
        first = array._submit_command(self._submitit_command_str)
        tasks = list(range(first.num_tasks))
        ids = [f"{first.job_id}_{index}" for index in range(len(pickles))]
        jobs: list[core.Job[Any]] = [self.job_class(self.folder, job_id, tasks) for job_id in ids]
        for job, pickle in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return jobs


def _require_trusted(pickle: Path) -> None:
    if problem := safe_files.pickle_problem(pickle):
        raise RequestError(problem)


def _refuse_shared(folder: Path) -> None:
    """Raise RequestError unless the folder belongs to this user and only this user can write to it. /tmp is refused."""
    found = folder.stat()
    shared = found.st_mode & stat.S_ISVTX or safe_files.ownership_problem(folder, found, "")
    if shared or found.st_uid != os.geteuid():
        raise RequestError(
            f"{folder} belongs to {safe_files.user(found.st_uid)} (mode {stat.S_IMODE(found.st_mode):04o}), expected "
            "a folder that only you can write to: another user who writes a pickle there can run programs as you. "
            f"Use a new folder: hpcinit.Executor({str(folder / 'NAME')!r})"
        )


def _folder(folder: Path) -> Path:
    """Return the part of the path `folder` before the placeholders (%j) that submitit replaces with job ids."""
    return Path(utils.JobPaths.get_first_id_independent_folder(folder))
