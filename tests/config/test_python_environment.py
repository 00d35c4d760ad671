"""The ranks' environment is checked before the job is queued: it exists, and has hpcinit and torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.checks import all_checks, python_environment
from hpcinit.config.compose import compose
from tests import environments
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, printed, submit

TORCH = "import torch\n"


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("PYTHONPATH", "CONDA_EXE", "PYTHONUSERBASE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(TORCH)
    (tmp_path / "plain.py").write_text("print('no imports')\n")


def found(*overrides: str, script: str = "train.py") -> list[str]:
    return all_checks.problems(compose([*overrides, "job=program", f"job.script={script}"]))


def venv(folder: Path, *options: str) -> Path:
    """Make a virtual environment without hpcinit and torch; return its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, folder], check=True)
    return next(folder.glob("lib/python3*/site-packages"))


def test_a_virtual_environment_without_the_packages(tmp_path: Path) -> None:
    """hpcinit is always needed, torch only by a program that imports it; each missing package is named with pip's line."""
    place = venv(tmp_path / "v")
    [message] = found(f"cluster.venv={tmp_path}/v")
    assert message.startswith(f"cluster.venv is '{tmp_path}/v', but hpcinit and torch are not installed there: run ")
    assert f"{tmp_path}/v/bin/python -m pip install {python_environment.CHECKOUT} torch, or set " in message
    assert message.endswith("or set check_paths=false if the job gets them from another place")
    assert found(f"cluster.venv={tmp_path}/v", "check_paths=false") == []
    [message] = found(f"cluster.venv={tmp_path}/v", script="plain.py")
    assert "but hpcinit is not installed there" in message
    module = [f"cluster.venv={tmp_path}/v", "job=program", "job.module=train"]
    assert "but hpcinit and torch are not installed there" in all_checks.problems(compose(module))[0]
    (place / "hpcinit-1.0.dist-info").mkdir()  # as an editable install leaves it
    [message] = found(f"cluster.venv={tmp_path}/v")
    assert "but torch is not installed there" in message
    (place / "torch").mkdir()
    (place / "torch/__init__.py").touch()
    assert found(f"cluster.venv={tmp_path}/v") == []


def test_packages_outside_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are also found through *.pth files, PYTHONPATH, the working folder and the system's site-packages."""
    place = venv(tmp_path / "v")
    for name in ("hpcinit", "torch"):
        (tmp_path / "extra" / name).mkdir(parents=True)
        (tmp_path / "extra" / name / "__init__.py").touch()
    (place / "extra.pth").write_text(f"# comment\nimport os\n{tmp_path}/extra\n")
    assert found(f"cluster.venv={tmp_path}/v") == []
    (place / "extra.pth").unlink()
    assert len(found(f"cluster.venv={tmp_path}/v")) == 1
    assert found(f"cluster.venv={tmp_path}/v", f"+cluster.env.PYTHONPATH={tmp_path}/extra") == []
    assert found(f"cluster.venv={tmp_path}/v", f"job.workdir={tmp_path}/extra", script=f"{tmp_path}/train.py") == []
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/extra")
    assert found(f"cluster.venv={tmp_path}/v") == []
    monkeypatch.delenv("PYTHONPATH")
    system = venv(tmp_path / "w", "--system-site-packages")
    user = tmp_path / "home/.local/lib" / system.parent.name / "site-packages"
    shutil.copytree(tmp_path / "extra", user)
    assert found(f"cluster.venv={tmp_path}/w") == [] and len(found(f"cluster.venv={tmp_path}/v")) == 1


def test_what_modules_and_setup_may_add(tmp_path: Path) -> None:
    """Modules may contain torch and setup lines may change PYTHONPATH, so nothing is refused that they may provide."""
    venv(tmp_path / "v")
    [message] = found(f"cluster.venv={tmp_path}/v", "cluster.modules=[pytorch]")
    assert "but hpcinit is not installed there" in message
    assert found(f"cluster.venv={tmp_path}/v", "cluster.setup=['export PYTHONPATH=/x']") == []


def test_the_python_of_the_tests_is_complete() -> None:
    """No message for this environment, given as a virtual environment or by its Python, nor for a wrapper script."""
    assert found(f"cluster.venv={sys.prefix}") == [] and found(f"cluster.python={sys.executable}") == []


def test_a_python_that_does_not_exist(tmp_path: Path) -> None:
    """A name must be on PATH or in the environment. Modules and setup may provide it."""
    [message] = found("cluster.python=python3.99")
    assert message.startswith("cluster.python is 'python3.99', which is not on PATH; if python3.99 exists only")
    assert found("cluster.python=python3") == []
    assert found("cluster.python=python3.99", "cluster.modules=[python]") == []
    environments.make(tmp_path / "v")
    (tmp_path / "v/bin/python3.99").symlink_to("python")
    assert found("cluster.python=python3.99", f"cluster.venv={tmp_path}/v") == []


def test_a_conda_environment_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the conda command the message gives the environment's folder, from conda's own list of environments."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    [message] = found("cluster.conda=train")
    assert message.startswith("cluster.conda is 'train', but there is no command conda on PATH: set cluster.conda to")
    assert "cluster.conda=/path/of/train, or load conda's module with cluster.modules" in message
    assert message.endswith("""'cluster.setup=[". ~/miniconda3/etc/profile.d/conda.sh", "conda activate train"]'""")
    place = environments.make(tmp_path / "conda/envs/train")
    (tmp_path / "home/.conda").mkdir(parents=True)
    (tmp_path / "home/.conda/environments.txt").write_text(f"/gone/train\n{place}\n")
    [message] = found("cluster.conda=train")
    assert f"cluster.conda={place}, or load" in message
    assert found("cluster.conda=train", "cluster.modules=[conda]") == []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/conda").write_text("#!/bin/sh\nexit 9\n")  # STAND-IN for conda: it only has to exist
    (tmp_path / "bin/conda").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert found("cluster.conda=train") == []
    next(place.glob("lib/python3*/site-packages/*.pth")).unlink()
    [message] = found("cluster.conda=train")
    assert message.startswith("cluster.conda is 'train', but hpcinit and torch are not installed there: run ")


def test_a_conda_environment_by_folder(tmp_path: Path) -> None:
    """The folder must contain bin/python; the conda command is not needed."""
    [message] = found(f"cluster.conda={tmp_path}/none")
    assert f"expected the folder of a conda environment: there is no {tmp_path}/none/bin/python" in message
    environments.make(tmp_path / "env")
    assert found(f"cluster.conda={tmp_path}/env") == []


@pytest.mark.slurm
def test_a_job_in_the_folder_of_a_conda_environment(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Without a conda command, ranks use the folder's Python and programs, and its activate.d scripts are sourced.

    STAND-IN: a virtual environment with conda's folder etc/conda/activate.d.
    """
    assert shutil.which("conda") is None
    place = environments.make(tmp_path / "my env")
    (place / "etc/conda/activate.d").mkdir(parents=True)
    (place / "etc/conda/activate.d/lib.sh").write_text("export ACTIVATED=yes\n")
    (tmp_path / "show.py").write_text(
        "import os, shutil, sys\nprint(sys.prefix, os.environ['CONDA_PREFIX'], os.environ['ACTIVATED'], shutil.which('prefix'))\n"
    )
    words = ("ranks_per_node=1", "wait=true", f"cluster.conda='{place}'", "--", "show.py")
    done = submit(hpcinit, slurm, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert printed(folder_of(done), 0).strip() == f"{place} {place} yes {place}/bin/prefix"


@pytest.mark.slurm
def test_a_submission_with_an_incomplete_environment(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Nothing is queued and no run folder is written; the exit status is 2."""
    venv(tmp_path / "v")
    done = submit(hpcinit, slurm, f"cluster.venv={tmp_path}/v", "--", "train.py")
    assert done.returncode == 2 and "but hpcinit and torch are not installed there" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_submitting_from_an_environment_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cluster.venv the ranks run the submitting Python; if it has no torch, the message names a Python that exists."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    [message] = found()
    assert message.startswith(
        f"the ranks would run {sys.executable}, the Python that runs hpcinit, but torch is not installed there"
    )
    assert f"or run {sys.executable} -m pip install torch" in message
    assert found(script="plain.py") == [] and found("check_paths=false") == []
    place = venv(tmp_path / "v")
    (place / "torch").mkdir()
    (place / "torch/__init__.py").touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "v"))
    assert f"set cluster.venv={tmp_path}/v, or run" in found()[0]
