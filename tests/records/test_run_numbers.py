"""No number of a run is used twice in a runs_dir."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpcinit.submit import folder
from tests.conftest import Run
from tests.skip_or_fail import skip_or_fail


def submitted(runs: Path, name: str = "x") -> Path:
    path = folder.claim(runs, name)
    folder.mark_submitted(path, {"job_id": "7", "engine": "local"})
    return path


@pytest.mark.parametrize("how", ["clean", "rm"])
def test_a_number_is_not_used_again(hpcinit: Run, tmp_path: Path, how: str) -> None:
    """After all runs of a name were removed, by `hpcinit clean` or with rm, the next one has a new number."""
    for _ in range(2):
        assert hpcinit("submit", "cluster=local", "again=true", "wait=true", "--", "true").returncode == 0
    if how == "clean":
        assert hpcinit("clean", "--yes").returncode == 0
    else:
        for path in Path("runs").glob("[!.]*"):
            shutil.rmtree(path)
    assert not list(Path("runs").glob("[!.]*"))
    assert hpcinit("submit", "cluster=local", "wait=true", "--", "true").returncode == 0
    assert [path.name for path in Path("runs").iterdir() if path.is_dir()] == ["true-0003"]


def test_a_refused_submission_frees_its_number(tmp_path: Path) -> None:
    """A folder that never became a job gives its number back, and a lower number that was used stays used."""
    shutil.rmtree(submitted(tmp_path))
    refused = folder.claim(tmp_path, "x")
    assert refused.name == "x-0002"
    folder.discard(refused)
    assert folder.next_path(tmp_path, "x").name == "x-0002"
    assert [path.name for path in tmp_path.iterdir()] == [".x-0001.number"]


def test_a_missing_mark(tmp_path: Path) -> None:
    """Without the marks, as in a folder of an earlier version, the run folders decide."""
    submitted(tmp_path), submitted(tmp_path)
    for path in tmp_path.glob(".*.number"):
        path.unlink()
    assert submitted(tmp_path).name == "x-0003"


def test_entries_of_another_user(tmp_path: Path) -> None:
    """In a shared runs_dir a folder or a mark of another user takes its own number, and no other."""
    if os.geteuid() != 0:
        skip_or_fail("needs root: makes files of another user")
    (tmp_path / "x-900000000").mkdir()
    (tmp_path / "x-0001").mkdir()
    (tmp_path / ".x-0002.number").touch()
    for path in tmp_path.iterdir():
        os.chown(path, 65534, 65534)
    assert submitted(tmp_path).name == "x-0003"
