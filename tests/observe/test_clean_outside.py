"""`hpcinit clean --outside` shows and removes what hpcinit wrote outside of run folders, and nothing that is in use."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from hpcinit.records import scratch
from tests import json_documents
from tests.conftest import Run
from tests.minislurm import MiniSlurm


@pytest.fixture
def wrote(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose folders contain what hpcinit writes."""
    disk = tmp_path / "disk" / f"hpcinit-{os.geteuid()}"
    for folder in (
        disk / "43.0.0-n1",
        disk / "kernels-n1",
        tmp_path / "cache/hpcinit/ops",
        tmp_path / "state/hpcinit/nodes",
    ):
        folder.mkdir(parents=True)
        (folder / "x").write_text("x" * 5000)
    (tmp_path / "runs/.x-0001.removed-7").mkdir(parents=True)
    for other in ("cache/other", "conf/cluster", "multirun"):
        (tmp_path / other).mkdir(parents=True)
    return {
        "TMPDIR": str(tmp_path / "disk"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HPCINIT_LOCAL_DISK": "",
    }


def listed(hpcinit: Run, env: dict[str, str], *words: str) -> dict[str, dict[str, object]]:
    done = hpcinit("clean", "--outside", "--json", *words, env=env)
    assert done.returncode == 0, done.stderr
    top = Path.cwd()
    found = json_documents.parse(done.stdout, "clean outside")
    return {str(Path(one["path"]).relative_to(top)): one for one in found if Path(one["path"]).is_relative_to(top)}


def own(tmp_path: Path) -> str:
    return f"disk/hpcinit-{os.geteuid()}"


def test_all_places_are_shown(hpcinit: Run, tmp_path: Path, wrote: dict[str, str]) -> None:
    """Without --yes each place is listed with its size, and nothing is removed."""
    expected = {own(tmp_path), "cache/hpcinit/ops", "state/hpcinit/nodes", "runs/.x-0001.removed-7"}
    found = listed(hpcinit, wrote)
    assert set(found) == expected
    assert not any(one["removed"] for one in found.values())
    assert all((tmp_path / path).exists() for path in expected)
    shown = hpcinit("clean", "--outside", env=wrote)
    assert "kernels" in shown.stdout and "nothing was removed; to remove without a confirmation" in shown.stderr


def test_a_folder_in_use_stays(hpcinit: Run, tmp_path: Path, wrote: dict[str, str]) -> None:
    """While a process holds the lock of a job's folder, this machine's folder stays."""
    with (tmp_path / own(tmp_path) / "43.0.0-n1" / scratch.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        found = listed(hpcinit, wrote)[own(tmp_path)]
        assert str(found["kept"]).startswith("a process uses ") and not found["removed"]


@pytest.mark.slurm
def test_removed_unless_a_job_may_use_it(
    hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, wrote: dict[str, str]
) -> None:
    """--yes removes each place, but the cache only without a job in the queue; settings and programs' files stay."""
    env = {**idle_slurm.env, **wrote, "TMPDIR": str(tmp_path / "disk")}
    idle_slurm.run("sbatch", "--begin=now+1hour", "--wrap=true")
    found = listed(hpcinit, env)
    assert str(found["cache/hpcinit/ops"]["kept"]).endswith("is in the queue and may use it")
    idle_slurm.run("scancel", "--me")
    found = listed(hpcinit, env)
    assert not found["cache/hpcinit/ops"]["kept"]
    for path in (own(tmp_path), "cache/hpcinit/ops", "state/hpcinit/nodes", "runs/.x-0001.removed-7"):
        assert path in found


def test_yes_removes(hpcinit: Run, tmp_path: Path, wrote: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--yes removes the listed places of this test; settings and files of programs stay."""
    from hpcinit.observe import clean, outside

    every = outside.places

    def below(runs_dir: Path, env: object) -> list[outside.Place]:
        # Never this machine's own /tmp/hpcinit-UID, which other tests use.
        return [one for one in every(runs_dir, wrote) if one.path.absolute().is_relative_to(tmp_path) and not one.kept]

    monkeypatch.setattr(outside, "places", below)
    assert clean.main(["--outside", "--yes"]) == 0
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {"conf/cluster", "cache/other", "multirun"} <= left
    assert not {own(tmp_path), "state/hpcinit/nodes", "runs/.x-0001.removed-7"} & left


def test_takes_no_run(hpcinit: Run) -> None:
    """A run beside --outside is refused, with the command to type."""
    done = hpcinit("clean", "--outside", "train-0001")
    assert done.returncode == 2 and "it takes no run, --state or --older-than: hpcinit clean --outside" in done.stderr
