"""Run folders are claimed once, private, and removed if they never became a job."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.base.errors import SubmitError
from hpcinit.submit import folder
from tests.skip_or_fail import skip_or_fail


def test_numbers_go_up_and_are_private(tmp_path: Path) -> None:
    """Folders with one name are numbered from 0001 and have mode 0700. A number is not used again."""
    first, second = folder.claim(tmp_path / "runs", "x"), folder.claim(tmp_path / "runs", "x")
    assert [first.name, second.name] == ["x-0001", "x-0002"]
    assert first.stat().st_mode & 0o777 == 0o700
    folder.discard(first)
    assert folder.next_path(tmp_path / "runs", "x").name == "x-0003"


def test_other_names_do_not_count(tmp_path: Path) -> None:
    """x-2 and x-y-0007 are not runs with the name x."""
    for name in ("x-y-0007", "x-2", "xx-0005", "x-0041"):
        (tmp_path / name).mkdir()
    assert folder.next_path(tmp_path, "x").name == "x-0042"


def test_many_at_once_get_one_each(tmp_path: Path) -> None:
    """Twenty simultaneous submissions claim twenty different folders."""
    claimed: list[Path] = []
    threads = [threading.Thread(target=lambda: claimed.append(folder.claim(tmp_path, "x"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in claimed) == [f"x-{i:04d}" for i in range(1, 21)]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a full file system: a real tmpfs of 64 KB. It needs root, as the Slurm tests do."""
    if os.geteuid() != 0:
        skip_or_fail("needs a real Slurm, and this machine lacks: root")
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
    (place / "runs").mkdir()
    try:
        with (place / "filler").open("wb") as file:
            file.write(b"x" * 65536)
    except OSError:
        pass
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.slurm
def test_full_disk_leaves_nothing(full_disk: Path) -> None:
    """On a full file system the message reports it, and no folder remains."""
    with pytest.raises(SubmitError, match=r"No space left on device; .*choose another runs_dir.*nothing was submitted"):
        folder.fill(folder.claim(full_disk / "runs", "x"), {"job.sh": "x" * 8192})
    assert list((full_disk / "runs").iterdir()) == []


@pytest.mark.slurm
def test_read_only_place_is_named(full_disk: Path) -> None:
    """On a read-only file system the message reports it and what to do."""
    subprocess.run(["mount", "-o", "remount,ro", full_disk], check=True)
    with pytest.raises(SubmitError, match="the file system is read-only; choose another runs_dir"):
        folder.claim(full_disk / "runs", "x")


def test_runs_dir_that_is_a_file(tmp_path: Path) -> None:
    """A file instead of runs_dir is reported."""
    (tmp_path / "runs").write_text("")
    with pytest.raises(SubmitError, match="which is not a folder"):
        folder.claim(tmp_path / "runs", "x")


def test_a_submitted_folder_is_never_discarded(tmp_path: Path) -> None:
    """discard() keeps a folder once its job exists."""
    path = folder.claim(tmp_path, "x")
    folder.mark_submitted(path, {"job_id": "1"})
    folder.discard(path)
    assert path.is_dir()
