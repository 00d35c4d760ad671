"""submitit's interface on hpcinit's executor: scripts, functions, arrays, and jobs whose end needs no accounting."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import submitit

from hpcinit.base.errors import RequestError
from hpcinit.submit.executor import Executor, Watcher
from tests import waiting
from tests.minislurm import MiniSlurm


def test_a_script_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Slurm on PATH, the executor renders scripts. A wrong parameter lists the valid ones."""
    monkeypatch.setenv("PATH", str(tmp_path))
    executor = Executor(tmp_path, program=True, header=["# mine"])
    text = executor.render("true", nodes=2, use_srun=False)
    assert text.startswith("#!/bin/bash\n# mine\n\n# Parameters\n") and text.endswith("\n# command\ntrue\n")
    assert "#SBATCH --nodes=2\n" in text and "--signal" not in text and "SUBMITIT" not in text
    with pytest.raises(ValueError, match=r"Unavailable parameter.*'node'"):
        executor.update_parameters(node=2)


def test_a_function_gets_submitits_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function keeps the signal that requeues it, and the variable that submitit.JobEnvironment reads."""
    monkeypatch.setenv("PATH", str(tmp_path))
    text = Executor(tmp_path).render("true")
    assert "#SBATCH --signal=USR2@90\n" in text and "\nexport SUBMITIT_EXECUTOR=slurm\n" in text
    assert (
        Executor(tmp_path, program=True).render("true", additional_parameters={"signal": "TERM@9"}).count("TERM") == 1
    )


def test_a_folder_that_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not the user's alone is refused before a job exists, and its mode does not change."""
    monkeypatch.setenv("PATH", str(tmp_path))  # without sbatch, a submission raises another error
    text = r"belongs to .* \(mode .*\), expected a folder that only you can write to"
    for mode in (0o1777, 0o777):
        tmp_path.chmod(mode)
        with pytest.raises(RequestError, match=text):
            Executor(tmp_path).submit(abs, 1)
        with pytest.raises(RequestError, match=text):
            Executor(tmp_path).map_array(abs, [1, 2])
        assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    assert not list(tmp_path.iterdir())
    if os.getuid() == 0:
        tmp_path.chmod(0o700)
        os.chown(tmp_path, 1234, 1234)
        with pytest.raises(RequestError, match="belongs to user 1234"):
            Executor(tmp_path).submit(abs, 1)


@pytest.mark.slurm
def test_functions_and_arrays(mini: MiniSlurm, tmp_path: Path) -> None:
    """submit and map_array return results; the folder of the pickles has mode 0700."""
    folder = tmp_path / "jobs"
    executor = Executor(folder)
    job = executor.submit(lambda x: x + 1, 4)
    jobs = executor.map_array(lambda x, y: x * y, [1, 2, 3], [10, 20, 30])
    assert job.result() == 5 and [each.result() for each in jobs] == [10, 40, 90]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [each.job_id for each in jobs] == [f"{jobs[0].job_id.partition('_')[0]}_{index}" for index in range(3)]


@pytest.mark.slurm
def test_a_crash_is_seen_without_accounting(mini: MiniSlurm, tmp_path: Path) -> None:
    """A job that died without a result is done, although this cluster has no accounting."""
    job = Executor(tmp_path / "jobs").submit(os._exit, 3)
    job._results_timeout_s = 0
    waiting.until(lambda: job.done(force_check=True), timeout_s=60)
    assert job.state == "FAILED" and isinstance(job.exception(), submitit.core.utils.UncompletedJobError)


@pytest.mark.slurm
def test_no_reply_is_no_end(mini: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Slurm's commands a job is not done. A job that Slurm has not known for a minute is."""
    watcher = Watcher()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert shutil.which("squeue") is None
        assert not watcher.is_done("999999", mode="force") and watcher.get_state("999999", "cache") == "UNKNOWN"
    monkeypatch.setattr("hpcinit.submit.executor.PURGED_S", -1)
    waiting.until(lambda: watcher.is_done("999999", mode="force"), timeout_s=60)
