"""Limits on queued jobs, enforced by a real slurmdbd."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.submitting import folder_of, submit

HELD = ("ranks_per_node=1", "cluster.gpu_flag=null", "+cluster.sbatch.hold=true", "account=root")


@pytest.fixture(scope="module")
def strict() -> Iterator[MiniSlurm]:
    """Start a cluster on which a user may have two jobs in the queue."""
    require_slurm(accounting=True)
    options = {"AccountingStorageEnforce": "associations,limits,qos"}
    name = f"strict-{os.getpid()}"
    with MiniSlurm(nodes=1, gpus=0, accounting=True, name=name, options=options) as cluster:
        cluster.run("sacctmgr", "--immediate", "modify", "user", "root", "set", "MaxSubmitJobs=2")
        _until(lambda: "MaxSubmitJobs=2(" in cluster.run("scontrol", "show", "assoc_mgr", "users=root", "flags=assoc"))
        yield cluster


def _until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slurm
def test_too_many_jobs(strict: MiniSlurm, hpcinit: Run) -> None:
    """A sweep, a chain and a job exceed the limit: those below it are submitted, and the message names the limit and
    how to see it.
    """
    sweep = submit(hpcinit, strict, *HELD, "-m", "seed=1,2,3", "--", "true")
    assert (sweep.returncode, sweep.stdout) == (1, "")
    assert "AssocMaxSubmitJobLimit" in sweep.stderr and "#SBATCH" not in sweep.stderr
    assert (
        "each task of an array counts. See the limit: `sacctmgr show assoc user=$USER format=account,maxsubmit`"
        in sweep.stderr
    )
    assert sweep.stderr.endswith("nothing was submitted\n")
    chain = submit(hpcinit, strict, *HELD, "chain=3", "--", "true")
    assert chain.returncode == 1 and "your account limits how many jobs each of its users may have" in chain.stderr
    assert len(strict.run("squeue", "--noheader").splitlines()) == 2 and folder_of(chain).exists()
    alone = submit(hpcinit, strict, *HELD, "name=x", "--", "true")
    assert alone.returncode == 1 and "AssocMaxSubmitJobLimit" in alone.stderr
    strict.cancel_all()


@pytest.mark.slurm
def test_a_limit_of_the_qos(strict: MiniSlurm, hpcinit: Run) -> None:
    """A limit of the QOS is reported as such, and a limit on a job's time shows the line with the time."""
    set_ = ("sacctmgr", "--immediate", "modify", "qos", "normal", "set")
    strict.run(*set_, "MaxSubmitJobsPerUser=1", "MaxWall=10", "Flags=DenyOnLimit")
    words = ("-m", "seed=1,2", "--", "true")
    _until(
        lambda: (
            "the qos limits how many jobs each user may have"
            in submit(hpcinit, strict, *HELD, "time_min=5", *words).stderr
        )
    )
    long = submit(hpcinit, strict, *HELD, "time_min=20", "--", "true")
    assert "QOSMaxWallDurationPerJobLimit" in long.stderr and "#SBATCH --time=00:20:00" in long.stderr
    assert "#SBATCH --nodes" not in long.stderr
