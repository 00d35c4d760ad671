"""hpcinit.Executor: functions as runs, with submitit's interface."""

from __future__ import annotations

import os
import stat
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import submitit

import hpcinit
from hpcinit import api
from hpcinit.base.errors import ConfigError, RequestError
from tests import conftest, waiting
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import begin_now, state

until = partial(waiting.until, timeout_s=120)
RANKS = {"nodes": 2, "tasks_per_node": 2, "timeout_min": 5}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def executor(cluster: str = "mini", **parameters: Any) -> hpcinit.Executor:
    """Return an executor for functions of this module, which the jobs cannot import."""
    found = hpcinit.Executor("jobs/%j", cluster=cluster)
    found.update_parameters(**{"cluster.gpu_flag": None} if cluster == "mini" else {}, **parameters)
    return found


def ranks() -> Any:
    """Return a function that compares the ranks of submitit and hpcinit."""

    def compared(add: int) -> tuple[int, ...]:
        import hpcinit

        there = submitit.JobEnvironment()
        with hpcinit.session() as here:
            print("rank", here.rank, "adds", add)
            assert (there.global_rank, there.num_tasks) == (here.rank, here.world_size)
            assert (there.local_rank, there.node, there.num_nodes) == (here.local_rank, here.node_rank, 2)
            assert there.paths.stdout.read_text() and there.paths.submitted_pickle.exists()
            return here.rank + add, here.world_size

    return compared


@pytest.mark.parametrize("launch", ["srun", "fork"])
def test_ranks_agree(launch: str) -> None:
    """With every way to start ranks, hpcinit.init() and submitit.JobEnvironment() have the same rank and world."""
    job = executor("local", launch=launch, **RANKS).submit(ranks(), 10)
    assert job.results() == [(10, 4), (11, 4), (12, 4), (13, 4)]
    assert "rank 3 adds 10\n" in str(job.task(3).stdout())


@pytest.mark.more
@pytest.mark.slurm
def test_an_array_on_slurm(mini: MiniSlurm, folder: Path) -> None:
    """map_array and batch() make one array each, whose tasks are runs of several ranks."""
    run = executor(slurm_partition="main", additional_parameters={"nice": 3}, **RANKS)
    jobs = run.map_array(ranks(), [10, 20])
    with run.batch():
        later = [run.submit(ranks(), add) for add in (30, 40)]
    assert [job.results()[3][0] for job in [*jobs, *later]] == [13, 23, 33, 43]
    for first, second in (jobs, later):
        assert second.job_id == first.job_id.removesuffix("_0") + "_1"
    assert {stat.S_IMODE(job.paths.folder.stat().st_mode) for job in jobs} == {0o700}
    text = (jobs[0].paths.folder.parent / "job.sh").read_text()
    assert "#SBATCH --signal=USR2@90\n" in text and "#SBATCH --nice=3\n" in text
    until(lambda: [one.state for one in api.runs("jobs")] == ["COMPLETED"] * 4)


@pytest.mark.slurm
def test_a_failure(mini: MiniSlurm, hpcinit: conftest.Run) -> None:
    """An exception of the function is job.exception(); why, status and logs show the run."""

    def fails() -> None:
        raise ValueError("lr is 4")

    job = executor(name="mine").submit(fails)
    assert "ValueError: lr is 4" in str(job.exception()) and "ValueError: lr is 4" in str(job.stderr())
    until(lambda: api.Run(job.paths.folder).state == "FAILED")
    run = str(job.paths.folder)
    assert run.endswith("/jobs/mine-0001")
    assert "ValueError: lr is 4" in hpcinit("why", run, env=mini.env).stdout
    assert "mine-0001" in hpcinit("status", run, env=mini.env).stdout
    assert "ValueError: lr is 4" in hpcinit("logs", run, env=mini.env).stdout


def test_the_rank_that_failed(folder: Path) -> None:
    """job.exception() is the error of the rank that raised one, also if that ended ranks before it."""

    def fails() -> None:
        if submitit.JobEnvironment().global_rank != 1:
            time.sleep(600)
        raise ValueError("lr is 4")

    job = executor("local", tasks_per_node=3).submit(fails)
    assert "(task=1)" in str(job.exception()) and "ValueError: lr is 4" in str(job.exception())
    with pytest.raises(submitit.core.utils.FailedJobError, match=r"\(task=1\)"):
        job.results()


@pytest.mark.slurm
def test_a_crash_and_a_cancellation(mini: MiniSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accounting, a rank that died without a result is seen, and the error names the command that explains it.

    A job that waits can be loaded, and Slurm sends it the signal that submitit handles.
    """
    crashed = executor().submit(os._exit, 3)
    monkeypatch.setattr(submitit.JobEnvironment, "USR_SIG", "USR1")  # SUBMITIT_PREEMPT_SIGNAL, read at the import
    waits = executor(additional_parameters={"begin": "now+1hour"}).submit(abs, 1)
    assert waits.submission().args == (1,)
    assert "#SBATCH --signal=USR1@90\n" in waits.paths.submission_file.read_text()
    waits.cancel()
    for job, expected in ((crashed, "FAILED"), (waits, "CANCELLED")):
        until(lambda job=job: job.done(force_check=True))  # type: ignore[misc]
        assert job.state == expected
        job._results_timeout_s = 0
        assert f"hpcinit why {job.paths.folder}" in str(job.exception())


class Counter:
    """Counts its attempts over requeues."""

    def __init__(self, attempt: int = 1) -> None:
        self.attempt = attempt

    def __call__(self, started: str) -> int:
        Path(started).write_text(str(self.attempt))
        while self.attempt == 1:
            time.sleep(0.1)
        return self.attempt

    def checkpoint(self, started: str) -> Any:
        return submitit.helpers.DelayedSubmission(type(self)(self.attempt + 1), started)


@pytest.mark.slurm
def test_a_checkpointable_callable_is_requeued(mini: MiniSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """USR2 before the time limit saves the callable with its checkpoint() and requeues its job."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["Counter"]))
    job = executor().submit(Counter(), str(folder / "started"))
    until((folder / "started").exists)
    job._interrupt()
    until(lambda: state(mini, job.job_id) == "PENDING")
    until(lambda: begin_now(mini, job.job_id) or state(mini, job.job_id) != "PENDING")
    assert job.result() == 2 and "Requeued job" in str(job.stdout())


@pytest.mark.slurm
def test_sigterm_saves(mini: MiniSlurm, folder: Path) -> None:
    """submitit ignores SIGTERM. If the function calls hpcinit.init(), should_stop() is true after it."""

    def trains(started: str) -> str:
        import hpcinit

        with hpcinit.session() as run:
            Path(started).touch()
            while not run.should_stop():
                time.sleep(0.1)
            return "saved"

    job = executor().submit(trains, str(folder / "started"))
    until((folder / "started").exists)
    mini.run("scancel", "--signal=TERM", job.job_id)
    assert job.result() == "saved"


def test_pickles_of_others_are_not_loaded(folder: Path) -> None:
    """A result, and a function, that another user wrote or could replace is refused."""
    job = executor("local").submit(abs, -3)
    assert job.result() == 3
    if os.getuid() == 0:
        os.chown(job.paths.result_pickle, 1234, 1234)
        with pytest.raises(RequestError, match="belongs to user 1234, expected root, so it is not loaded"):
            job.result()
    job.paths.folder.chmod(0o777)
    for load in (job.result, job.submission):
        with pytest.raises(RequestError, match="every user can write to it"):
            load()


def test_the_names_of_auto_executor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and parameters have the names of submitit.AutoExecutor, with and without a cluster."""
    for cluster in ("local", None):
        run = hpcinit.Executor("jobs", cluster=cluster, slurm_max_num_timeout=7)
        run.update_parameters(name="mine", timeout_min=3, slurm_qos="high", tasks_per_node=2, slurm_use_srun=True)
        assert run.max_num_timeout == 7
    text = run.render("true")
    assert all(f"#SBATCH --{line}\n" in text for line in ("job-name=mine", "time=3", "qos=high", "ntasks-per-node=2"))
    hpcinit.Executor("jobs", cluster="local").update_parameters(stderr_to_stdout=True, srun_args=None)


def test_what_a_function_cannot_do(folder: Path) -> None:
    """Keys and parameters for programs are refused with the reason, when they are set, and change nothing."""
    with pytest.raises(ConfigError, match="nosuch"):
        hpcinit.Executor("jobs", cluster="nosuch")
    run = executor("local")
    with pytest.raises(ConfigError, match="chain=2 is for programs"):
        run.update_parameters(chain=2)
    with pytest.raises(ConfigError, match="launch=torchrun is for programs"):
        run.update_parameters(launch="torchrun")
    with pytest.raises(ConfigError, match="teardown is a parameter of submitit that does not apply"):
        run.update_parameters(slurm_teardown=["true"], mem="3G")
    with pytest.raises(ConfigError, match="stderr_to_stdout is a parameter of submitit that does not apply"):
        run.update_parameters(stderr_to_stdout=False)
    run.max_pickle_size_gb = 0
    with pytest.raises(RequestError, match="GB in total, expected at most 0"):
        run.submit(abs, 1)
    assert not [path for path in (folder / "jobs").iterdir() if path.is_dir()]


def test_resubmit_has_no_function(folder: Path) -> None:
    """The module that runs a function names the executor when there is no pickle."""
    from hpcinit.jobs import function

    with pytest.raises(RequestError, match=r"submit the function with hpcinit\.Executor"):
        function.main([])


def test_a_program_that_uses_hydra(folder: Path) -> None:
    """Submitting from a Hydra program leaves its config and version_base as they were."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.version import getbase

    before = (HydraConfig.instance().cfg, getbase())
    executor("local", additional_parameters={"nice": 3})
    assert (HydraConfig.instance().cfg, getbase()) == before
