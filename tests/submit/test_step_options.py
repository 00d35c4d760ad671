"""The ranks' step starts with the job's environment and without MPI, whatever the site's defaults are. Real Slurm."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.config.compose import compose
from hpcinit.submit import srun_step
from hpcinit.submit.run_path import RunPath
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.submitting import folder_of, printed, submit
from tests.test_sbatch import finish, start

SHAPE = ["nodes=2", "ranks_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "wait=true"]
SAY = ["--", "sh", "-c", "echo greeting $GREETING"]


@pytest.fixture(scope="module")
def pmix() -> Iterator[MiniSlurm]:
    """A site whose default MPI type cannot be loaded: its PMIx library is missing."""
    require_slurm()
    with MiniSlurm(nodes=2, gpus=0, name=f"pytest-{os.getpid()}-pmix", options={"MpiDefault": "pmix"}) as slurm:
        yield slurm


@pytest.mark.slurm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launch", ["srun", "fork"])
@pytest.mark.parametrize(
    "setup",
    [
        "export SLURM_EXPORT_ENV=NONE",
        *(pytest.param(setup, marks=pytest.mark.more) for setup in ("export SRUN_EXPORT_ENV=NONE", ":")),
    ],
)
def test_the_sites_defaults_do_not_reach_the_step(hpcinit: Run, pmix: MiniSlurm, launch: str, setup: str) -> None:
    """MpiDefault=pmix does not stop the step, and the variable that sbatch --export=NONE sets (here: a site's setup line)
    does not take the environment from the ranks."""
    words = [*SHAPE, f"launch={launch}", f"cluster.setup=['{setup}']", "+job.env.GREETING=hello", *SAY]
    done = submit(hpcinit, pmix, *words)
    folder = folder_of(done)
    assert done.returncode == 0, (folder / "logs/job.log").read_text()
    assert [printed(folder, rank) for rank in (0, 1)] == ["greeting hello\n"] * 2


@pytest.mark.slurm
@pytest.mark.parametrize("script", ["ddp.sbatch", "torchrun.sbatch", "deepspeed.sbatch"])
def test_a_plain_script_needs_no_mpi(pmix: MiniSlurm, tmp_path: Path, script: str) -> None:
    """The scripts in sbatch/ start their step too where the default MPI type cannot be loaded."""
    (tmp_path / "say.py").write_text("print('up', flush=True)\n")
    place = Path(__file__).parents[2] / "sbatch" / script
    job = finish(pmix, tmp_path, start(pmix, tmp_path, "--nodes=2", "--ntasks-per-node=1", str(place), "say.py"))
    assert job.state == "COMPLETED" and job.log.count("up") == 2, job.log


def test_another_mpi_type_can_be_chosen() -> None:
    """cluster.srun.mpi replaces the default, and a program whose backend is MPI gets the site's."""

    def step(*words: str) -> str:
        return srun_step.srun_step_line(compose(["cluster=mini", *words]), RunPath(Path("/r")), Path("/w"))

    assert "--mpi=none" in step() and "--export=ALL" in step()
    assert (
        "--mpi=cray_shasta" in step("+cluster.srun.mpi=cray_shasta") and step("+cluster.srun.mpi=x").count("mpi=") == 1
    )


# sbatch, with a token in the job's environment: this Slurm has no plugin for JWT, and a client that sees one fails.
WITH_TOKEN = """#!/bin/sh
case "$*" in *job.sh*) exec {sbatch} --export=ALL,SLURM_JWT=eyJsecret "$@" ;; esac
exec {sbatch} "$@"
"""


@pytest.mark.slurm
def test_the_token_for_slurm_stays_outside_of_the_job(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """sbatch may need SLURM_JWT to submit; the ranks do not get it."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/sbatch"
    fake.write_text(WITH_TOKEN.format(sbatch=shutil.which("sbatch")))
    fake.chmod(0o755)
    env = {**idle_slurm.env, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    program = ["--", sys.executable, "-c", "import os; print('token', os.environ.get('SLURM_JWT'))"]
    done = hpcinit("submit", "cluster=mini", "ranks_per_node=1", "wait=true", *program, env=env)
    folder = folder_of(done)
    assert done.returncode == 0, (folder / "logs/job.log").read_text()
    assert printed(folder, 0) == "token None\n"


def test_the_token_for_slurm_stays_outside_of_a_local_job(hpcinit: Run) -> None:
    """cluster=local starts the job itself, and hands no token on."""
    program = ["--", sys.executable, "-c", "import os; print('token', os.environ.get('SLURM_JWT'))"]
    done = hpcinit("submit", "nodes=1", "ranks_per_node=1", "wait=true", *program, env={"SLURM_JWT": "eyJsecret"})
    assert done.returncode == 0 and printed(folder_of(done), 0) == "token None\n", done.stdout + done.stderr
