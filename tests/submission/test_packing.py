"""The archive of an environment: made once, what is in it, what is not, and what is adapted where it is unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcinit import local_environment
from hpcinit.config.compose import compose
from hpcinit.config.schema import Config
from hpcinit.facts import scratch, telling
from hpcinit.facts.errors import SubmitError
from hpcinit.submission import packing
from tests import environments
from tests.leaving_out import leave_out

Place = tuple[Path, Config]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """An environment and a config that packs it."""
    venv = environments.make(tmp_path / "venv")
    monkeypatch.setattr(packing, "_installed", packing._installed.__wrapped__)  # what changes here is looked at again
    return venv, compose(
        ["cluster=mini", "launch.env_to_local=true", f"cluster.venv={venv}", f"cluster.cache={tmp_path}/c"]
    )


def unpacked(place: Place, folder: Path) -> Path:
    """What a node makes of the archive."""
    folder.mkdir()
    shutil.copy(packing.archive(place[1]), folder / scratch.ARCHIVE)
    local_environment.unpack(folder, place[0])
    return folder / scratch.ENVIRONMENT


def test_it_runs_from_another_place(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python, a package and a command are the copy's, and nothing is compiled anew; what stays behind is told."""
    venv = place[0]
    subprocess.run([venv / "bin/python", "-c", "import inside"], check=True)
    (venv / "bin/absolute").symlink_to(venv / "bin/prefix")
    packing.ready(place[1])
    said = capsys.readouterr().err
    assert f"packing {venv} for launch.env_to_local, once until it changes: " in said
    assert f"; {environments.ROOT}; " in said and said.count("the working folder") == 1
    copy = unpacked(place, tmp_path / "node")
    code = "import sys, inside; print(sys.prefix, inside.__file__, inside.__cached__)"
    done = subprocess.run([copy / "bin/python", "-v", "-c", code], capture_output=True, text=True, check=True)
    assert all(word.startswith(str(copy)) for word in done.stdout.split())
    assert not [line for line in done.stderr.splitlines() if line.startswith("# wrote") and str(copy) in line]
    for command in ("prefix", "absolute"):
        assert subprocess.check_output([copy / "bin" / command], text=True).strip() == str(copy)
    assert f"VIRTUAL_ENV={copy}" in (copy / "bin/activate").read_text().replace('"', "")
    assert not (tmp_path / "node" / scratch.ARCHIVE).exists()


def test_once_until_something_is_installed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The second submission finds the archive; a new, a changed or a missing package makes another."""
    site = next(place[0].glob("lib/python*/site-packages"))
    paths = set()
    (site / "one.dist-info").mkdir()
    for text in ("", "1", "2", None):
        if text:
            (site / "one.dist-info/RECORD").write_text(text)
            os.utime(site / "one.dist-info/RECORD", (int(text), int(text)))
        elif text is None:
            shutil.rmtree(site / "one.dist-info")
        packing.ready(place[1])
        assert "packed in" in capsys.readouterr().err
        packing.ready(place[1])
        assert capsys.readouterr().err == ""
        paths.add(packing.archive(place[1]))
    assert len(paths) == 4 and all(path.exists() for path in paths)


def test_old_archives_go_when_nobody_submits_with_them(place: Place) -> None:
    """A job may wait for a while; after 30 days an archive that something newer has replaced is removed."""
    packing.ready(place[1])
    old = packing.archive(place[1])
    recent = old.with_name(old.name.replace("-", "-1", 1))
    for name in ("1", "2"):
        (place[0] / "bin" / name).touch()
        os.utime(old, (0, 0))
        packing.ready(place[1])
        assert not old.exists()
        old = packing.archive(place[1])
    assert not recent.exists() and old.exists()


def test_quiet(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """With -q nothing is said beside the answer, however long it takes."""
    telling.choose(telling.QUIET)
    try:
        packing.ready(place[1])
    finally:
        telling.choose(telling.PLAIN)
    assert packing.archive(place[1]).exists() and capfd.readouterr() == ("", "")


def test_no_room(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before the first byte is written, and nothing is left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5e6))
    (place[0] / "large").write_bytes(b"")
    os.truncate(place[0] / "large", 6_000_000)
    with pytest.raises(
        SubmitError, match=r"cannot pack .*venv into .*: 0.01 GB free, 0.01 GB needed; nothing was submitted"
    ):
        packing.ready(place[1])
    assert list(packing.archive(place[1]).parent.iterdir()) == []


def test_an_environment_that_is_gone(place: Place) -> None:
    """`hpcinit render` of an old run may meet one."""
    shutil.rmtree(place[0])
    with pytest.raises(SubmitError, match="belongs to no environment"):
        packing.archive(place[1])


def test_only_this_environments_path_is_adapted(tmp_path: Path) -> None:
    """Another whose name begins with the same letters stays."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/a").write_text("#!/me/venv/bin/python\n/me/venv2/bin:/me/venv:'/me/venv'\n")
    local_environment.adapt(tmp_path, Path("/me/venv"))
    assert (tmp_path / "bin/a").read_text() == f"#!{tmp_path}/bin/python\n/me/venv2/bin:{tmp_path}:'{tmp_path}'\n"


def test_an_archive_of_another_user_is_refused(place: Place) -> None:
    """Whoever makes the archive first, in a cache that many share, would choose the Python that all jobs run."""
    if os.geteuid() != 0:
        leave_out("only root can make a file another user's")
    path = packing.archive(place[1])
    path.parent.mkdir(parents=True)
    path.touch()
    os.chown(path, 4242, 4242)
    with pytest.raises(SubmitError, match=rf"{path} belongs to user 4242 .*cluster.cache=FOLDER names a place of your"):
        packing.ready(place[1])
    path.unlink()
    path.parent.chmod(0o777)
    with pytest.raises(SubmitError, match=rf"every user can write it.*chmod go-w {path.parent}.*nothing was submitted"):
        packing.ready(place[1])
