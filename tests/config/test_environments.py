"""Whether an environment can be taken to the nodes' own disks, before anything is packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.config import checks
from hpcinit.config.compose import compose


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch(0o755)
    (tmp_path / "venv/pyvenv.cfg").touch()
    return tmp_path / "venv"


def problems(*words: str) -> list[str]:
    return checks.problems(compose(["cluster=mini", "launch.env_to_local=true", *words]))


@pytest.mark.parametrize("key", ["cluster.venv={}", "cluster.python={}/bin/python", "cluster.conda={}"])
def test_a_virtual_or_conda_environment_can_be_packed(venv: Path, key: str) -> None:
    """By any of the keys that name one; a conda environment is one by its conda-meta."""
    if "conda" in key:
        (venv / "pyvenv.cfg").unlink()
        (venv / "conda-meta").mkdir()
    assert problems(key.format(venv)) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=local"], "but cluster local starts the ranks on this machine, where the environment is already: "),
        (["container.image=docker://x", "cluster.container.runtime=apptainer"], "run in container.image 'docker://x', which is one file already"),
        (["cluster.conda=train"], "cluster.conda is 'train', expected the folder of the environment, as `conda env list`"),
        (["cluster.python=python3"], "cluster.python is 'python3', expected the path of the Python of a virtual or conda"),
        (["cluster.python=/usr/bin/env"], "and /usr/bin/env belongs to none (no pyvenv.cfg, no conda-meta in /usr): cluster.venv=FOLDER"),
        (["cluster.venv=/nowhere", "check_paths=false"], "/nowhere/bin/python is not on this machine, where its environment would be packed"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(words: list[str], message: str) -> None:
    """One message, with what to do."""
    (problem,) = problems(*words)
    assert problem.startswith("launch.env_to_local ") and message in problem


def test_without_sbcast(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sbatch is and sbcast is not, nothing can be sent; where neither is, a dry run goes on."""
    words = f"cluster.venv={venv}"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert problems(words) == []
    monkeypatch.setattr("shutil.which", lambda name: None if name == "sbcast" else f"/bin/{name}")
    (problem,) = problems(words)
    assert "sbcast is not on PATH, where sbatch is: load the module that brings it" in problem
