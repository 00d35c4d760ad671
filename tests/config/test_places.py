"""Missing paths and a full disk are reported before any file is created."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.checks import all_checks
from hpcinit.config.compose import compose
from tests.conftest import Run

RUNTIME = "cluster.container.runtime=apptainer"


def found(*overrides: str) -> list[str]:
    return all_checks.problems(compose(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.venv=/nowhere"],
            "cluster.venv is '/nowhere', expected a virtual environment: there is no /nowhere/bin/python",
        ),
        (
            ["cluster.python=/nowhere/python"],
            "cluster.python is '/nowhere/python', expected a program that you can execute",
        ),
        (["cluster.python=/etc/passwd"], "cluster.python is '/etc/passwd', expected a program that you can execute"),
        (
            [RUNTIME, "container.image=train.sif"],
            "container.image is 'train.sif', expected a file that exists, or a registry's",
        ),
        ([RUNTIME, "container.image=/nowhere/box"], "container.image is '/nowhere/box', expected a file that exists"),
    ],
)
def test_missing_paths(overrides: list[str], message: str) -> None:
    """Each missing path gives one message, which names the key that disables the check."""
    (problem,) = found(*overrides)
    assert message in problem and problem.endswith(" exists only on the compute nodes, set check_paths=false")
    assert found(*overrides, "check_paths=false") == []


def test_existing_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing Python, environment, image file or image folder, and an image in a registry, are accepted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sif").touch()
    (tmp_path / "box").mkdir()
    assert found(f"cluster.python={sys.executable}") == [] and found(f"cluster.venv={sys.prefix}") == []
    for image in ("train.sif", f"{tmp_path}/box", "docker://x/y.sif", "'nvcr.io#nvidia/pytorch:25.01-py3'", "ubuntu"):
        assert found(RUNTIME, f"container.image={image}") == []


def test_paths_of_the_cluster_are_not_checked_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sbatch on PATH, a dry run for a cluster does not check that cluster's paths; with sbatch it does."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert found("cluster=mini", "cluster.venv=/nowhere") == []
    monkeypatch.setattr("hpcinit.checks.environment.shutil.which", lambda name: f"/bin/{name}")
    assert len(found("cluster=mini", "cluster.venv=/nowhere")) == 1


def test_a_runs_dir_that_is_a_file(hpcinit: Run, tmp_path: Path) -> None:
    """A runs_dir that is a file, or below a file, is an error."""
    (tmp_path / "file").touch()
    for place in ("file", "file/runs"):
        assert found(f"runs_dir={tmp_path}/{place}") == [
            f"runs_dir is '{tmp_path}/{place}', but {tmp_path}/file is not a folder: choose another runs_dir=..."
        ]


@pytest.mark.slurm  # a mount needs root, as the Slurm tests do
def test_a_full_disk(hpcinit: Run, tmp_path: Path) -> None:
    """A disk without space for a run is reported before any file is written, also in a dry run."""
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "small"], check=True)
    try:
        done = hpcinit("submit", "runs_dir=small/runs", "--", "true")
        assert done.returncode == 2 and "with 1 MB free, expected 16 MB or more: free some space" in done.stderr
        assert list((tmp_path / "small").iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)


def test_a_home_folder_of_an_unknown_user() -> None:
    """~name of an unknown user gives its own message, and neither it nor a NUL gives a traceback."""
    problems = all_checks.problems(compose(["runs_dir='~nosuchuser/runs'"]))
    assert (
        "runs_dir is '~nosuchuser/runs', and there is no user 'nosuchuser'; expected a folder, or ~/..." in problems[0]
    )
    assert [each for each in all_checks.problems(compose(['runs_dir="~x\0y"'])) if "'~x\\x00y'" in each]
