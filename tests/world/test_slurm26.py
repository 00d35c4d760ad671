"""What Slurm 26.05 writes differently from 22.05 and 24.11, recorded on 26.05.5. `make test-slurm26` has the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcinit.base.errors import SubmitError, WorldError
from hpcinit.checks import validate
from hpcinit.world import launchers

STARTS = "sbatch: Job 1 to start at 2001-11-22T20:21:37 a using 2 processors on nodes n[1-2] in partition main\n"
REFUSED = "allocation failure: Requested node configuration is not available\n"


@pytest.mark.parametrize(
    ("step", "what"),
    [("-5", "a batch script"), ("-6", "an interactive shell of salloc"), ("-4", "a login to the node")],
)
def test_steps_without_ranks_have_negative_numbers(step: str, what: str) -> None:
    """Without /proc too, a batch script of several tasks is not mistaken for rank 0 of a step."""
    env = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": step, "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0", "SLURM_GTIDS": "0", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NODELIST": "n[1-2]",
    }  # fmt: skip
    with pytest.raises(WorldError, match=rf"SLURM_STEP_ID is {step}: {what}.*the job has 4 tasks: "):
        launchers.read(env)


def answered(folder: Path, stderr: str) -> str:
    """Return what hpcinit reads from this answer of a stand-in for `sbatch --test-only`, with exit status 0."""
    (folder / "sbatch").write_text(f"#!/bin/sh\nprintf '%s' '{stderr}' >&2\n")
    (folder / "sbatch").chmod(0o755)
    (folder / "job.sh").write_text("#!/bin/sh\n#SBATCH --nodes=3\n")
    return validate.sbatch_test_only(folder / "job.sh", {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})


def test_the_start_has_another_wording(tmp_path: Path) -> None:
    """The line has 'a' before 'using'."""
    assert answered(tmp_path, STARTS) == "Slurm expects to start the job now on n[1-2]"


def test_a_refusal_has_status_0(tmp_path: Path) -> None:
    """A job that can never start is refused by its text, because the exit status is 0."""
    with pytest.raises(SubmitError, match="sbatch --test-only: Requested node configuration is not available"):
        answered(tmp_path, REFUSED)
