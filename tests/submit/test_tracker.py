"""`tracker`: rank 0 of every attempt of a run has the variables with which its tracker continues the same run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import finish, log
from tests.submitting import folder_of, job_id_of, printed, submit

PRINTS = """
import os, sys
names = ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID")
print("tracker", *(os.environ.get(name) for name in names), flush=True)
"""
SMALL = ("nodes=1", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null")
LOCAL = ("cluster=local", "wait=true")


def variables(folder: Path, rank: int = 0) -> list[list[str]]:
    """Return WANDB_RUN_ID, WANDB_RESUME and MLFLOW_RUN_ID of each attempt of a rank."""
    return [line.split()[1:] for line in printed(folder, rank).splitlines() if line.startswith("tracker ")]


def ids(folder: Path) -> list[str]:
    return [one[0] for one in variables(folder)]


@pytest.mark.slurm
@pytest.mark.ranks
def test_a_requeue_and_a_resubmission(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """Both attempts of a requeued job have one id, only rank 0 has it, and a new submission has another one."""
    (tmp_path / "train.py").write_text(PRINTS + "sys.exit(os.environ.get('SLURM_RESTART_COUNT', '0') == '0')")
    words = (*SMALL, "ranks_per_node=2", "restart.max_restarts=1", "restart.on=[failure]", "tracker=wandb")
    done = submit(hpcinit, idle_slurm, *words, "--", "train.py")
    folder = folder_of(done)
    assert finish(idle_slurm, job_id_of(done)) == "COMPLETED", log(folder)
    first, second = variables(folder)
    assert first == second == [ids(folder)[0], "allow", "None"] and re.fullmatch(r"[0-9a-f]{16}", first[0])
    assert variables(folder, rank=1) == [["None"] * 3] * 2
    again = hpcinit("resubmit", folder.name, env=idle_slurm.env)
    finish(idle_slurm, job_id_of(again))
    other = folder_of(again)
    assert ids(other)[0] not in ("None", first[0])


@pytest.mark.slurm
@pytest.mark.ranks
def test_tasks_of_a_sweep(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """Each task of an array is a run of the tracker."""
    (tmp_path / "train.py").write_text(PRINTS)
    words = (*SMALL, "ranks_per_node=1", "wait=true", "tracker=wandb", "name=sweep")
    done = submit(hpcinit, idle_slurm, "-m", "seed=1,2", *words, "--", "train.py")
    assert done.returncode == 0, done.stderr
    found = [ids(tmp_path / f"runs/sweep-0001/{task}")[0] for task in (0, 1)]
    assert "None" not in found and len(set(found)) == 2


@pytest.mark.ranks
@pytest.mark.parametrize(
    "launch",
    [
        ("launch=torchrun", "launch.max_restarts=1"),
        ("launch=fork", "launch.preload=[]", "restart.warm=true"),
    ],
    ids=["torchrun", "fork"],
)
def test_a_restart_inside_the_job(hpcinit: Run, tmp_path: Path, launch: tuple[str, ...]) -> None:
    """The new rank 0 has the id of the one before."""
    fails = "sys.exit(os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    (tmp_path / "train.py").write_text(PRINTS + "import time; time.sleep(1)\n" + fails)
    done = hpcinit("submit", *LOCAL, "ranks_per_node=2", "tracker=wandb", *launch, "--", "train.py", timeout=240)
    folder = folder_of(done)
    assert done.returncode == 0, log(folder)
    found = ids(folder)
    assert len(found) == 2 and len(set(found)) == 1 and "None" not in found
    assert {one[0] for one in variables(folder, rank=1)} == {"None"}


@pytest.mark.ranks
def test_what_the_user_sets_wins(hpcinit: Run, tmp_path: Path) -> None:
    """Beside the user's id hpcinit sets nothing, the user's WANDB_RESUME stays, and without the key nothing is set."""
    (tmp_path / "train.py").write_text(PRINTS)

    def of(*words: str) -> list[str]:
        return variables(folder_of(hpcinit("submit", *LOCAL, *words, "--", "train.py")))[0]

    assert of("tracker=wandb", "+job.env.WANDB_RUN_ID=mine") == ["mine", "None", "None"]
    assert of("tracker=wandb", "+job.env.WANDB_RESUME=must")[1] == "must"
    assert of() == ["None"] * 3
    assert (
        "tracker is 'tensorboard', expected one of: wandb, mlflow, null"
        in hpcinit("submit", *LOCAL, "tracker=tensorboard", "--", "train.py").stderr
    )


@pytest.mark.ranks
def test_the_run_of_mlflow(hpcinit: Run, tmp_path: Path) -> None:
    """The id that the program reports is given to the next start of rank 0, unless the user sets one."""
    reports = "import hpcinit\nwith hpcinit.session() as run:\n    run.tracker_id('0f3e')\n"
    fails = "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    (tmp_path / "train.py").write_text(PRINTS + reports + fails)
    words = (*LOCAL, "tracker=mlflow", "launch=fork", "restart.warm=true")
    found = variables(folder_of(hpcinit("submit", *words, "--", "train.py", timeout=240)))
    assert [one[2] for one in found] == ["None", "0f3e"] and found[1][:2] == ["None", "None"]
    words = (*words, "+job.env.MLFLOW_RUN_ID=mine")
    found = variables(folder_of(hpcinit("submit", *words, "--", "train.py", timeout=240)))
    assert [one[2] for one in found] == ["mine", "mine"]
