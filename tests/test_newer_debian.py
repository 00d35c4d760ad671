"""The folder with a newer Debian is made once and atomically. `make test-slurm24` and `test-slurm26` show that it works."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.minislurm import MiniSlurmError, newer_debian
from tests.minislurm.shell import PATH

root = pytest.mark.slurm  # as the clusters, it needs root and the right to mount


def debootstrap(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace debootstrap with a stand-in; $5 is the folder that it fills."""
    (folder / "bin").mkdir()
    (folder / "bin/debootstrap").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin/debootstrap").chmod(0o755)
    monkeypatch.setattr("tests.minislurm.newer_debian.PATH", f"{folder}/bin:{PATH}")


@root
def test_the_folder_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command uses the folder of the first one, also without access to a mirror."""
    debootstrap(tmp_path, monkeypatch, 'mkdir -p "$5/var/cache/apt/archives"; echo "$4 from $6 by $7" > "$5/made"')
    folder = newer_debian.made("forky", tmp_path / "cache", "file:/mirror")
    assert (folder / "tree/made").read_text() == "forky from file:/mirror by /usr/share/debootstrap/scripts/sid\n"
    (tmp_path / "bin/debootstrap").write_text("#!/bin/sh\nexit 1\n")
    assert newer_debian.made("forky", tmp_path / "cache") == folder
    assert newer_debian.folder_in(tmp_path / "cache", "trixie") != folder


@root
def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If debootstrap fails, the error quotes it, and the next command does not use the incomplete folder."""
    debootstrap(tmp_path, monkeypatch, 'mkdir "$5"; echo "E: no such mirror"; exit 3')
    cache = tmp_path / "cache"
    cache.mkdir()
    left = cache / f"{newer_debian.folder_in(cache, 'trixie').name}.part-killed"
    left.mkdir()
    with pytest.raises(MiniSlurmError, match=r"debootstrap: exit status 3\n  E: no such mirror"):
        newer_debian.made("trixie", cache, "file:/mirror")
    assert list(cache.iterdir()) == []


def test_without_an_archive_of_debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """If apt has no Debian archive, the error names the option for it."""
    monkeypatch.setattr(newer_debian, "run", lambda _: "\n")
    with pytest.raises(MiniSlurmError, match=r"no archive of Debian here .* give --mirror URL"):
        newer_debian.apts_mirror()


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without root nothing is tried."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(MiniSlurmError, match="not root"):
        newer_debian.made("trixie", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_what_the_command_sees_of_this_machine() -> None:
    """Python with its venv and its modules, the checkout and /tmp are visible, each once."""
    seen = newer_debian.visible()
    for path in [sys.executable, subprocess.__file__, pytest.__file__, __file__, "/tmp"]:
        assert any(Path(path).is_relative_to(folder) for folder in seen), path
    assert not {Path("/"), Path("/usr"), Path("/usr/bin")} & set(seen)
    assert all(not set(path.parents) & set(seen) for path in seen)
