"""Paths that are not there, and a disk without room, are told before anything is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.config import checks
from hpcinit.config.compose import compose
from tests.conftest import Run

RUNTIME = "cluster.container.runtime=apptainer"


def found(*overrides: str) -> list[str]:
    return checks.problems(compose(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.venv=/nowhere"],
            "cluster.venv is '/nowhere', expected a virtual environment: no /nowhere/bin/python",
        ),
        (
            ["cluster.python=/nowhere/python"],
            "cluster.python is '/nowhere/python', which is no program that you may run",
        ),
        (["cluster.python=/etc/passwd"], "cluster.python is '/etc/passwd', which is no program that you may run"),
        (
            [RUNTIME, "container.image=train.sif"],
            "container.image is 'train.sif', expected a file that exists, or a registry's",
        ),
        ([RUNTIME, "container.image=/nowhere/box"], "container.image is '/nowhere/box', expected a file that exists"),
    ],
)
def test_what_is_not_there(overrides: list[str], message: str) -> None:
    """Each path that does not exist is one message that says how to switch the check off; then it is none."""
    (problem,) = found(*overrides)
    assert message in problem and problem.endswith(" is on the compute nodes only: check_paths=false")
    assert found(*overrides, "check_paths=false") == []


def test_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python, an environment, an image as a file or as a folder, and what a registry has, are no problems."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sif").touch()
    (tmp_path / "box").mkdir()
    assert found(f"cluster.python={sys.executable}") == [] and found(f"cluster.venv={sys.prefix}") == []
    for image in ("train.sif", f"{tmp_path}/box", "docker://x/y.sif", "'nvcr.io#nvidia/pytorch:25.01-py3'", "ubuntu"):
        assert found(RUNTIME, f"container.image={image}") == []


def test_away_from_the_cluster_its_paths_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without sbatch, a dry run for a cluster says nothing of that cluster's paths; with it, it does."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert found("cluster=mini", "cluster.venv=/nowhere") == []
    monkeypatch.setattr("hpcinit.config.environment_checks.shutil.which", lambda name: f"/bin/{name}")
    assert len(found("cluster=mini", "cluster.venv=/nowhere")) == 1


def test_a_runs_dir_that_is_a_file(hpcinit: Run, tmp_path: Path) -> None:
    """A file where a folder is wanted is refused, itself or above."""
    (tmp_path / "file").touch()
    for place in ("file", "file/runs"):
        assert found(f"runs_dir={tmp_path}/{place}") == [
            f"runs_dir is '{tmp_path}/{place}', but {tmp_path}/file is not a folder: choose another runs_dir=..."
        ]


@pytest.mark.slurm  # a mount needs root, as they do
def test_a_full_disk(hpcinit: Run, tmp_path: Path) -> None:
    """A disk with no room for a run is told before anything is written, in a dry run too."""
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "small"], check=True)
    try:
        done = hpcinit("submit", "runs_dir=small/runs", "--", "true")
        assert done.returncode == 2 and "with 1 MB free, expected 16 MB or more: free some space" in done.stderr
        assert list((tmp_path / "small").iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)


def test_a_home_that_nobody_has() -> None:
    """~name of no user is refused for what it is, and neither it nor a NUL ends in a traceback."""
    said = checks.problems(compose(["runs_dir='~nosuchuser/runs'"]))
    assert "runs_dir is '~nosuchuser/runs', and there is no user 'nosuchuser'; expected a folder, or ~/..." in said[0]
    assert [each for each in checks.problems(compose(['runs_dir="~x\0y"'])) if "'~x\\x00y'" in each]
