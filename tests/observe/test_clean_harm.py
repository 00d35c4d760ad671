"""What `hpcinit clean` must not remove: anything that may be alive, and anything that is not this user's or hpcinit's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcinit.observe import clean
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.observe.test_state import SMALL, statuses
from tests.skip_or_fail import skip_or_fail
from tests.submitting import folder_of, job_of, submit
from tests.waiting import until


def finished(hpcinit: Run, name: str = "over") -> Path:
    done = hpcinit("submit", "cluster=local", f"name={name}", "wait=true", "--", "true")
    return folder_of(done)


def removed(hpcinit: Run, *words: str, **options: dict[str, str]) -> list[str]:
    """Run `hpcinit clean --yes`, and return the names of the removed runs."""
    done = hpcinit("clean", "--yes", "--json", *words, **options)
    return [Path(one["run"]).name for one in map(json.loads, done.stdout.splitlines()) if one.get("removed")]


def test_another_users_run_stays(hpcinit: Run) -> None:
    """In a runs_dir of another user, `clean` removes only this user's runs, although `status` lists both."""
    if os.geteuid():
        skip_or_fail("only root can give a folder to another user")
    theirs, ours = finished(hpcinit, "theirs"), finished(hpcinit, "ours")
    for path in (theirs.parent, theirs, *theirs.rglob("*")):
        os.chown(path, 51234, 51234)
    assert "theirs-0001" in hpcinit("status").stdout
    assert removed(hpcinit) == [ours.name] and theirs.exists()
    named = hpcinit("clean", "--yes", theirs.name)
    assert named.returncode == 2 and "belongs to user 51234" in named.stderr and theirs.exists()


def test_ctrl_c_while_runs_are_removed(
    hpcinit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that was being removed is hidden, and the runs after it keep their names and files."""
    for name in ("one", "two", "three"):
        finished(hpcinit, name)
    left = []

    def rmtree(path: Path) -> None:
        left.append(path.name)
        if len(left) == 2:
            raise KeyboardInterrupt
        shutil_rmtree(path)

    shutil_rmtree = shutil.rmtree
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(KeyboardInterrupt):
        clean.main(["--yes"])
    assert left[1].startswith(".two-0001.hpcinit-removed-")
    assert sorted(path.name for path in (tmp_path / "runs").glob("[!.]*")) == ["three-0001"]
    assert (tmp_path / "runs/three-0001/submission.json").exists()
    assert "two-0001" not in hpcinit("status").stdout


def test_a_run_inside_a_run_stays(hpcinit: Run) -> None:
    """A finished run whose program submitted a run into its folder stays until that run is removed."""
    outer = finished(hpcinit, "outer")
    folder = folder_of(
        hpcinit(
            "submit",
            "cluster=local",
            f"runs_dir={outer}/code/runs",
            "--",
            "sh",
            "-c",
            "until [ -e go ]; do sleep 0.1; done",
        )
    )
    assert folder.is_relative_to(outer)
    assert removed(hpcinit) == [] and (folder / "job.sh").exists()
    named, inner = hpcinit("clean", "--yes", outer.name), folder.relative_to(Path.cwd())
    assert named.returncode == 2 and f"outer-0001 contains another run, {inner}: remove that first" in named.stderr
    Path("go").touch()
    until(lambda: removed(hpcinit, str(folder)) == [folder.name])
    assert removed(hpcinit) == [outer.name]


def test_a_linked_run_stays(hpcinit: Run, tmp_path: Path) -> None:
    """A run folder that was moved to another disk, and is a link here, keeps its link and its files."""
    run = finished(hpcinit)
    (tmp_path / "disk").mkdir()
    shutil.move(run, tmp_path / "disk/x")
    run.symlink_to(tmp_path / "disk/x")
    assert removed(hpcinit) == [] and run.is_symlink() and (run / "job.sh").exists()
    named = hpcinit("clean", "--yes", run.name)
    assert named.returncode == 2 and f"is a link to {tmp_path}/disk/x" in named.stderr


def test_a_sweep_that_is_being_submitted_stays(hpcinit: Run) -> None:
    """While the submitter waits for the controller between two arrays, the tasks of the first one may be over already."""
    run = finished(hpcinit, "sweep")
    record = json.loads((run / "submission.json").read_text())
    for number in (0, 1):
        (run / str(number)).mkdir()
    for name in ("local.json", "spec.json", "submission.json", "exit.json"):
        shutil.copy(run / name, run / "0" / name)
    (run / "sweep.json").write_text(json.dumps({"format": 1, "tasks": {"0": "x=1", "1": "x=2"}}))
    (run / "submission.json").write_text(
        json.dumps({**record, "sweep": [{"job_id": record["job_id"], "script": "job.sh"}]})
    )
    assert removed(hpcinit) == []
    long_ago = (1.7e9, 1.7e9)
    os.utime(run / "submission.json", long_ago)
    assert removed(hpcinit) == [run.name]


@contextmanager
def other_host(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process of this machine that has the id of a run's engine on another one."""
    victim = subprocess.Popen(["sleep", "600"])
    try:
        document = json.loads((run / "local.json").read_text())
        document["pid"] = document.get("engine", {})["pid"] = victim.pid
        (run / "local.json").write_text(json.dumps(document))
        yield victim
    finally:
        victim.kill()
        victim.wait()


def test_a_local_run_of_another_host(hpcinit: Run, tmp_path: Path) -> None:
    """A `cluster=local` run on another host of the same home folder is not removed, and `cancel` ends no process here."""
    command = ["unshare", "--uts", "sh", "-c", 'hostname other-host; exec "$@"', "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        skip_or_fail("this user may not change a host name in a namespace")
    words = ["cluster=local", "name=far", "--", "sh", "-c", "until [ -e end ]; do sleep 0.1; done"]
    hpcinit_command = hpcinit("submit", "cluster=local", "name=probe", "wait=true", "--", "true").args[:3]
    done = subprocess.run([*command, *hpcinit_command, "submit", *words], capture_output=True, text=True, check=False)
    run = folder_of(done)
    try:
        with other_host(run) as victim:
            cancelled = hpcinit("cancel", run.name)
            assert victim.poll() is None
            assert cancelled.returncode == 2 and "runs on other-host" in cancelled.stderr
            assert json.loads(hpcinit("status", "--json", run.name).stdout)["state"] == "RUNNING"
            victim.kill()
            victim.wait()
            assert run.name not in removed(hpcinit) and run.exists()
    finally:
        (tmp_path / "end").touch()
    until(lambda: json.loads((run / "local.json").read_text())["state"] == "COMPLETED")


def test_the_cache_folder_contains_other_files(hpcinit: Run, tmp_path: Path) -> None:
    """With XDG_CACHE_HOME=/scratch/me, ~/.cache/hpcinit may be a checkout: only what hpcinit wrote there is removed."""
    for place in ("cache/hpcinit/.git", "cache/hpcinit/ops/py311", "state/hpcinit/nodes", "disk"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "cache/hpcinit/.hpcinit-43.nonce").write_text("")
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state"), "PATH": "/usr/bin"}
    found = hpcinit("clean", "--outside", "--json", env=env).stdout
    listed = {Path(one["path"]) for one in map(json.loads, found.splitlines())}
    assert tmp_path / "cache/hpcinit" not in listed and tmp_path / "cache/hpcinit/ops" in listed


@pytest.mark.slurm
def test_a_run_that_slurm_may_restart_stays(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """While Slurm does not answer, only a run that succeeded is removed. A moved runs_dir keeps its running chain."""
    env = idle_slurm.env
    bad = folder_of(submit(hpcinit, idle_slurm, *SMALL, "wait=true", "name=bad", "--", "false"))
    good = folder_of(submit(hpcinit, idle_slurm, *SMALL, "wait=true", "name=good", "--", "true"))
    chain = folder_of(submit(hpcinit, idle_slurm, *SMALL, "name=chain", "chain=2", "--", "sleep", "600"))
    until(lambda: statuses(hpcinit, idle_slurm, "chain-0001")[0]["state"] == "RUNNING")
    # A submitter between mkdir and its record, and one between sbatch and its record.
    (tmp_path / "runs/new-0001").mkdir()
    killed = folder_of(submit(hpcinit, idle_slurm, *SMALL, "name=killed", "--", "sleep", "600"))
    (killed / "submission.json").unlink()
    nowhere = tmp_path / "slurm.conf"
    nowhere.write_text(idle_slurm.conf.read_text().replace("SlurmctldHost=ctl(", "SlurmctldHost=ctl(127.0.0.99)#"))
    assert removed(hpcinit, env={"SLURM_CONF": str(nowhere)}) == [good.name]
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "runs", moved)
    assert removed(hpcinit, "--runs-dir", str(moved), env=env) == [bad.name]
    assert {"chain-0001", "new-0001", "killed-0001"} <= {path.name for path in moved.iterdir()}
    assert (
        job_of(moved / chain.name) in idle_slurm.run("squeue", "--noheader", "--format=%A", "--states=RUNNING").split()
    )
    idle_slurm.cancel_all()
