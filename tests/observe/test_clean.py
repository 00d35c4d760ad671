"""`hpcinit clean` removes finished runs after a confirmation, and never a running one."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcinit.observe import clean
from hpcinit.records import heartbeats
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.observe.test_state import SMALL, statuses
from tests.submitting import submit
from tests.waiting import until


@pytest.mark.slurm
def test_only_finished_runs_are_removed(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """Finished runs and sweeps are listed and removed; running and waiting ones stay, and are refused by name."""
    env, runs = idle_slurm.env, tmp_path / "runs"
    submit(hpcinit, idle_slurm, *SMALL, "wait=true", "name=good", "--", "true")
    submit(hpcinit, idle_slurm, *SMALL, "wait=true", "name=bad", "--", "false")
    submit(hpcinit, idle_slurm, "-m", "seed=1,2", *SMALL, "wait=true", "name=many", "--", "true")
    submit(hpcinit, idle_slurm, *SMALL, "name=busy", "--", "sleep", "600")
    submit(hpcinit, idle_slurm, *SMALL, "+cluster.sbatch.hold=true", "name=waits", "--", "true")
    until(lambda: statuses(hpcinit, idle_slurm, "busy-0001")[0]["state"] == "RUNNING")
    listed = hpcinit("clean", env=env)
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["good-0001", "bad-0001", "many-0001"], listed
    assert (
        "nothing was removed. To remove these runs without confirmation, repeat the command with --yes" in listed.stderr
    )
    assert len(list(runs.glob("[!.]*"))) == 5
    for name, about in (("busy-0001", "is RUNNING"), ("waits-0001", "is PENDING")):
        refused = hpcinit("clean", name, "--yes", env=env)
        assert refused.returncode == 2
        assert (
            f"{name} {about}: only finished runs are removed. Cancel it first: hpcinit cancel {name}" in refused.stderr
        )
    task = hpcinit("clean", "many-0001/0", "--yes", env=env)
    assert task.returncode == 2 and "is a task of a sweep, and only a whole sweep can be removed" in task.stderr
    [failed] = hpcinit("clean", "--state", "failed", "--yes", "--json", env=env).stdout.splitlines()
    document = json.loads(failed)
    assert (Path(document["run"]).name, document["states"], document["removed"]) == ("bad-0001", {"FAILED": 1}, True)
    assert document["bytes"] > 1000 and document["age_s"] < 600
    assert hpcinit("clean", "--yes", env=env).stderr.startswith("removed 2 runs, ")
    assert {path.name for path in runs.glob("[!.]*")} == {"busy-0001", "waits-0001"}
    assert "no finished runs to remove in" in hpcinit("clean", env=env).stderr
    idle_slurm.cancel_all()


def answered(folder: Path, answer: str) -> str:
    """Run `hpcinit clean` in a terminal, type the answer, and return what the terminal shows."""
    terminal, program_end = pty.openpty()
    env = {**os.environ, "TERM": "xterm"}
    command = [sys.executable, "-m", "hpcinit", "clean"]
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=program_end, stdout=program_end, stderr=program_end)
    os.close(program_end)
    os.write(terminal, answer.encode() + b"\n")
    shown = b""
    try:
        while data := os.read(terminal, 65_536):
            shown += data
    except OSError:  # the program closed its end
        pass
    os.close(terminal)
    assert process.wait(150) == 0
    return shown.decode()


def test_a_terminal_gets_a_question(hpcinit: Run, tmp_path: Path) -> None:
    """Only y or yes removes the runs, with their checkpoints."""
    hpcinit("submit", "wait=true", "name=one", "--", "true")
    folder = tmp_path / "runs/one-0001"
    (folder / "checkpoints/step-1").mkdir(parents=True)
    (folder / "checkpoints/step-1/weights").write_bytes(os.urandom(3_000_000))
    shown = answered(tmp_path, "")
    assert "remove 1 run (3.0 MB) with their logs and checkpoints? [y/N]" in shown and "nothing was removed" in shown
    assert folder.exists()
    assert "removed 1 run, 3.0 MB" in answered(tmp_path, "y")
    assert not list((tmp_path / "runs").glob("[!.]*"))


def test_runs_that_may_still_run_are_kept(hpcinit: Run, tmp_path: Path) -> None:
    """An UNKNOWN state, a recent end with --older-than, and recent heartbeats without an exit record keep a run."""
    hpcinit("submit", "wait=true", "name=one", "--", "true")
    folder = tmp_path / "runs/one-0001"
    assert "no finished runs to remove" in hpcinit("clean", "--older-than", "1", "--yes").stderr
    record = json.loads((folder / "local.json").read_text())
    (folder / "exit.json").unlink()
    (folder / heartbeats.FOLDER / "1.0.0").mkdir(parents=True)
    (folder / heartbeats.FOLDER / "1.0.0/n1.json").write_text("{}")
    refused = hpcinit("clean", "one-0001", "--yes")
    assert refused.returncode == 2 and "one-0001 still writes heartbeats: only finished runs" in refused.stderr
    old = time.time() - 3 * clean.ALIVE_S
    os.utime(folder / heartbeats.FOLDER / "1.0.0/n1.json", (old, old))
    (folder / "local.json").write_text("{}")
    unknown = hpcinit("clean", "one-0001", "--yes")
    assert (
        unknown.returncode == 2 and "If it has ended, remove the folder yourself: rm -r runs/one-0001" in unknown.stderr
    )
    assert folder.exists()
    (folder / "local.json").write_text(json.dumps(record))
    assert hpcinit("clean", "one-0001", "--yes").returncode == 0 and not folder.exists()
