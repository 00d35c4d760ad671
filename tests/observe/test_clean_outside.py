"""`hpcinit clean --outside` shows and removes what hpcinit wrote outside of run folders, and nothing that is in use."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcinit.observe import clean, outside
from hpcinit.records import scratch
from tests import json_documents
from tests.conftest import Run
from tests.minislurm import MiniSlurm

HOST = os.uname().nodename


@pytest.fixture
def wrote(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose folders contain what hpcinit writes."""
    disk = tmp_path / "disk" / f"hpcinit-{os.geteuid()}"
    for folder in (
        disk / f"43.0.0-{HOST}",
        disk / f"kernels-{HOST}",
        tmp_path / "cache/hpcinit/ops",
        tmp_path / "state/hpcinit/nodes",
    ):
        folder.mkdir(parents=True)
        (folder / "x").write_text("x" * 5000)
    disk.chmod(0o700)
    (tmp_path / "runs/.x-0001.hpcinit-removed-7").mkdir(parents=True)
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
    expected = {own(tmp_path), "cache/hpcinit/ops", "state/hpcinit/nodes", "runs/.x-0001.hpcinit-removed-7"}
    found = listed(hpcinit, wrote)
    assert set(found) == expected
    assert not any(one["removed"] for one in found.values())
    assert all((tmp_path / path).exists() for path in expected)
    shown = hpcinit("clean", "--outside", env=wrote)
    assert (
        "kernels" in shown.stdout
        and "nothing was removed. To remove these folders without confirmation" in shown.stderr
    )


def test_a_folder_in_use_stays(hpcinit: Run, tmp_path: Path, wrote: dict[str, str]) -> None:
    """While a process holds the lock of a job's folder, this machine's folder stays."""
    with (tmp_path / own(tmp_path) / f"43.0.0-{HOST}" / scratch.LOCK).open("w") as lock:
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
    for path in (own(tmp_path), "cache/hpcinit/ops", "state/hpcinit/nodes", "runs/.x-0001.hpcinit-removed-7"):
        assert path in found


def test_yes_removes(hpcinit: Run, tmp_path: Path, wrote: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--yes removes the listed places of this test; settings and files of programs stay."""
    monkeypatch.setattr(outside, "places", only_below(tmp_path, wrote))
    assert clean.main(["--outside", "--yes"]) == 0
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {"conf/cluster", "cache/other", "multirun"} <= left
    assert not {"state/hpcinit/nodes", "runs/.x-0001.hpcinit-removed-7"} & left
    assert not any(path.startswith(f"{own(tmp_path)}/") for path in left), "the empty folder stays for the next start"


def test_all_removes_runs_and_the_other_places(
    hpcinit: Run, tmp_path: Path, wrote: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--all removes runs, then what --outside removes. The number stays: a job whose folder was deleted may still run."""
    monkeypatch.setattr(outside, "places", only_below(tmp_path, wrote))
    (tmp_path / "t.py").write_text("print()\n")
    done = hpcinit("submit", "cluster=local", "ranks_per_node=1", "wait=true", "--", "t.py", env=wrote)
    assert done.returncode == 0, done.stderr
    for _ in range(2):  # the second time, no run is left
        assert clean.main(["--all", "--yes"]) == 0
        assert not (tmp_path / "runs/t-0001").exists() and not (tmp_path / "state/hpcinit/nodes").exists()
    assert (tmp_path / "runs/.t-0001.number").exists() and (tmp_path / "conf/cluster").exists()
    assert hpcinit("clean", "--all", "--outside", env=wrote).returncode == 2


def only_below(tmp_path: Path, env: dict[str, str]) -> Callable[..., list[outside.Place]]:
    """Return outside.places() without this machine's own /tmp/hpcinit-UID, which other tests use."""
    every = outside.places

    def below(runs_dir: Path, _: object) -> list[outside.Place]:
        return [one for one in every(runs_dir, env) if one.path.absolute().is_relative_to(tmp_path)]

    return below


# Use the folders as a starting rank does. Print a line when they are taken, end after the next line of input.
USES = """
import os, sys
from hpcinit.records import scratch
mine = scratch.base(os.environ)
assert str(mine).startswith(os.environ["TMPDIR"]), mine
for job in sys.argv[1:]:
    folder, kernels = scratch.take(mine, job), scratch.kept(mine)
    for path in (folder / "x", kernels / f"x{job}"):
        path.write_text("x")
print("took", flush=True)
sys.stdin.readline()
assert all(path.exists() for path in (folder / "x", kernels / f"x{job}"))
"""


def uses(env: dict[str, str], *jobs: str) -> subprocess.Popen[str]:
    """Start a process that uses the folders."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", USES, *jobs], env={**os.environ, **env}, stdin=pipe, stdout=pipe, text=True
    )


def test_a_process_that_starts_before_the_answer(
    tmp_path: Path, wrote: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a process starts to use between the list and the answer stays, with kernels. The rest is removed."""
    started = []

    def answer(question: str) -> bool:
        started.append(uses(wrote, "44.0.0"))
        assert started[0].stdout is not None and started[0].stdout.readline() == "took\n"
        (tmp_path / "in the queue").touch()
        return True

    def in_the_queue(_: Path) -> str:
        return "job 7 is in the queue and may use it" if (tmp_path / "in the queue").exists() else ""

    monkeypatch.setattr(outside, "places", only_below(tmp_path, wrote))
    monkeypatch.setattr(outside, "_why_in_use", in_the_queue)
    monkeypatch.setattr(clean, "_confirmed", answer)
    assert clean.main(["--outside"]) == 0
    assert {path.name for path in (tmp_path / own(tmp_path)).iterdir()} == {f"44.0.0-{HOST}", f"kernels-{HOST}"}
    assert (tmp_path / "cache/hpcinit/ops/x").exists() and not (tmp_path / "state/hpcinit/nodes").exists()
    said = capsys.readouterr().err
    assert (
        "was not removed: a process uses " in said
        and "ops was not removed: job 7 is in the queue and may use it" in said
    )
    started[0].communicate("end\n", timeout=60)
    assert started[0].returncode == 0


def test_ctrl_c_during_the_second_check(tmp_path: Path) -> None:
    """A folder that was renamed gets its name back, because a job may need it."""
    checks: list[BaseException | None] = [KeyboardInterrupt(), None]

    def why_kept() -> str:
        if interrupt := checks.pop():
            raise interrupt
        return ""

    ops = tmp_path / "ops"
    (ops / "x").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        outside.remove(outside.Place(ops, "ops", why_kept))
    assert [path.name for path in tmp_path.iterdir()] == ["ops"] and (ops / "x").exists()


def test_processes_that_start_all_the_time(tmp_path: Path, wrote: dict[str, str]) -> None:
    """Of 300 starts in three processes, none loses its folder while another process removes what is unused."""
    started = [uses(wrote, *(f"{one}.{number}" for number in range(100))) for one in range(3)]
    (place,) = (one for one in only_below(tmp_path, wrote)(tmp_path, {}) if one.disk)
    waiting = {one.stdout for one in started}
    while waiting:
        outside.remove(place)
        waiting -= set(select.select(list(waiting), [], [], 0)[0])
    for one in started:
        assert one.communicate("end\n", timeout=60)[0] == "took\n"
        assert one.returncode == 0


def test_without_squeue_the_cache_stays(hpcinit: Run, tmp_path: Path, wrote: dict[str, str]) -> None:
    """On a machine that shares the home folder with a cluster, jobs may use the cache, and also what was renamed."""
    renamed = tmp_path / "cache/hpcinit/.ops.hpcinit-removed-7"
    renamed.mkdir()
    found = listed(hpcinit, {**wrote, "PATH": str(tmp_path)})
    for name in ("ops", renamed.name):
        assert str(found[f"cache/hpcinit/{name}"]["kept"]).startswith("squeue is not on PATH")


def test_a_folder_of_another_host_stays(tmp_path: Path, wrote: dict[str, str]) -> None:
    """TMPDIR may be on a shared disk, where a lock of another host may be invisible: neither a start nor clean removes it."""
    theirs = tmp_path / own(tmp_path) / "43.0.0-other"
    theirs.mkdir()
    (theirs / scratch.LOCK).touch()
    scratch.sweep(theirs.parent)
    (place,) = (one for one in only_below(tmp_path, wrote)(tmp_path, {}) if one.disk)
    assert outside.remove(place) == f"{theirs} belongs to another host"
    assert list(theirs.parent.iterdir()) == [theirs]


def test_takes_no_run(hpcinit: Run) -> None:
    """A run beside --outside is refused, with the command to type."""
    done = hpcinit("clean", "--outside", "train-0001")
    assert done.returncode == 2 and "cannot be combined with a run, --state or --older-than" in done.stderr
