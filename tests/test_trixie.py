"""The folder with Debian trixie: made once, whole or not at all. That it works is what `make test-slurm24` shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.minislurm import MiniSlurmError, trixie
from tests.minislurm.shell import PATH

root = pytest.mark.slurm  # as the clusters, it needs root and the right to mount


def debootstrap(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a stand-in into the place of debootstrap: $5 is the folder that it is to fill."""
    (folder / "bin").mkdir()
    (folder / "bin/debootstrap").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin/debootstrap").chmod(0o755)
    monkeypatch.setattr("tests.minislurm.trixie.PATH", f"{folder}/bin:{PATH}")


@root
def test_the_folder_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command finds what the first one made, also where it cannot reach a mirror."""
    debootstrap(tmp_path, monkeypatch, 'mkdir -p "$5/var/cache/apt/archives"; echo "$4 from $6" > "$5/made"')
    folder = trixie.made(tmp_path / "cache", "file:/mirror")
    assert (folder / "tree/made").read_text() == "trixie from file:/mirror\n"
    (tmp_path / "bin/debootstrap").write_text("#!/bin/sh\nexit 1\n")
    assert trixie.made(tmp_path / "cache") == folder


@root
def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where debootstrap fails the error quotes it, and no half folder is taken for a whole one next time."""
    debootstrap(tmp_path, monkeypatch, 'mkdir "$5"; echo "E: no such mirror"; exit 3')
    cache = tmp_path / "cache"
    cache.mkdir()
    left = cache / f"{trixie.folder_in(cache).name}.part-killed"
    left.mkdir()
    with pytest.raises(MiniSlurmError, match=r"debootstrap: exit status 3\n  E: no such mirror"):
        trixie.made(cache, "file:/mirror")
    assert list(cache.iterdir()) == []


def test_without_an_archive_of_debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose apt knows no Debian, the error names the option that does."""
    monkeypatch.setattr(trixie, "run", lambda _: "\n")
    with pytest.raises(MiniSlurmError, match=r"no archive of Debian here .* give --mirror URL"):
        trixie.apts_mirror()


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without root nothing is tried."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(MiniSlurmError, match="not root"):
        trixie.made(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_what_the_command_sees_of_this_machine() -> None:
    """Python with its venv and its modules, checkout and /tmp are there, each once and nothing around them."""
    seen = trixie.visible()
    for path in [sys.executable, subprocess.__file__, pytest.__file__, __file__, "/tmp"]:
        assert any(Path(path).is_relative_to(folder) for folder in seen), path
    assert not {Path("/"), Path("/usr"), Path("/usr/bin")} & set(seen)
    assert all(not set(path.parents) & set(seen) for path in seen)
