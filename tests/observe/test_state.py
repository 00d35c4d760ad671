"""States of runs as the real Slurm tells them: with accounting and without, with its memory and after."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcinit.observe import state
from hpcinit.slurm import queue
from hpcinit.submit import folder
from hpcinit.submit.follow import follow
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.slurm_lines import squeue_line
from tests.submitting import submit
from tests.waiting import until

SMALL = ("ranks_per_node=1", "cluster.gpu_flag=null")


@pytest.fixture(scope="module", params=[False, True], ids=["no accounting", "accounting"])
def forgetful(request: pytest.FixtureRequest) -> Iterator[MiniSlurm]:
    """A cluster that forgets a job 2 s after its end (it looks once a minute)."""
    require_slurm(accounting=request.param)
    name = f"seen-{os.getpid()}-{int(request.param)}"
    with MiniSlurm(nodes=1, gpus=0, accounting=request.param, name=name, options={"MinJobAge": "2"}) as cluster:
        yield cluster
        cluster.start_controller()


def told(hpcinit: Run, cluster: MiniSlurm, *words: str, **env: str) -> list[dict[str, Any]]:
    done = hpcinit("status", "--json", *words, env={**cluster.env, **env})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def counted(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """The real squeue, sacct and scontrol, with a line in a file for each question."""
    (tmp_path / "counting").mkdir()
    log = tmp_path / "questions"
    for name in ("squeue", "sacct", "scontrol"):
        file = tmp_path / "counting" / name
        file.write_text(f'#!/bin/sh\necho {name} >> {log}\nexec {shutil.which(name)} "$@"\n')
        file.chmod(0o755)
    return {"PATH": f"{tmp_path}/counting:{os.environ['PATH']}"}, log


def recorded(runs: Path, name: str, job_id: str) -> Path:
    path = folder.claim(runs, name)
    folder.mark_submitted(path, {"job_id": job_id, "engine": "slurm"})
    return path


@pytest.mark.slurm
def test_after_slurm_has_forgotten(forgetful: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """What a job left behind is right once the controller has forgotten it, and while it is away; sacct knows more."""
    accounting = forgetful.shape.accounting
    for words in (("sh", "-c", "exit 0"), ("sh", "-c", "exit 3"), ("sleep", "600")):
        submit(hpcinit, forgetful, *SMALL, "--", *words)
    until(lambda: told(hpcinit, forgetful, "sleep-0001")[0]["name"] == "RUNNING")
    [running] = told(hpcinit, forgetful, "sleep-0001", SQUEUE_PARTITION="high", SLURM_TIME_FORMAT="relative")
    assert running["source"] == "squeue" and 0 <= running["elapsed_s"] < 100 and 400 < running["left_s"] <= 600
    assert running["start"][:2] == "20" and running["start"][10] == "T"
    os.kill(json.loads((tmp_path / "runs/sleep-0001/exit.json").read_text())["pid"], signal.SIGKILL)  # the batch shell
    until(lambda: not forgetful.run("squeue", "--noheader", "--states=all", "--me"))
    end = ["COMPLETED", "FAILED", "FAILED" if accounting else "UNKNOWN"]
    now = told(hpcinit, forgetful, "all")
    assert [run["name"] for run in now] == end
    assert [run["exit_status"] for run in now] == [0, 3, 137 if accounting else None]
    assert {run["source"] for run in now} == ({"sacct"} if accounting else {"exit.json", ""})
    if not accounting:
        assert "left no exit record" in now[2]["reason"]
    _waited_for(hpcinit, forgetful, [run["job_id"] for run in now[:2]])
    submit(hpcinit, forgetful, *SMALL, "--", "sleep", "600")
    until(lambda: told(hpcinit, forgetful, "sleep-0002")[0]["name"] == "RUNNING")
    if accounting:  # it hears of a start a little later
        until(lambda: "RUNNING" in forgetful.run("sacct", "--noheader", "-X", "--format=State"))
    forgetful.stop_controller()
    env, questions = counted(tmp_path)
    now = told(hpcinit, forgetful, **env)
    forgetful.start_controller()
    assert [run["name"] for run in now] == [*end, "RUNNING" if accounting else "UNKNOWN"]
    assert [run["exit_status"] for run in now[:2]] == [0, 3]
    assert now[3]["reason"].startswith("as sacct says; squeue: " if accounting else "squeue: ")
    assert questions.read_text().split() == ["squeue", "sacct"]
    assert told(hpcinit, forgetful, "sleep-0002")[0]["name"] == "RUNNING"
    forgetful.cancel_all()


def _waited_for(hpcinit: Run, cluster: MiniSlurm, ids: list[str]) -> None:
    """after_ok of a job, by its id, that sacct alone knows: as of one in the queue; an id that nobody knows is refused.

    ids: of a job that ended well, and of one that ended with 3. why knows the second's status, by its id.
    """
    well, failed = (submit(hpcinit, cluster, f"after_ok={job}", "dry_run=true", "--", "true") for job in ids)
    if cluster.shape.accounting:
        assert well.returncode == 0 and "--dependency" not in well.stdout, well.stderr
        assert f"after_ok={ids[1]}: job {ids[1]} ended as FAILED, and this one would never start" in failed.stderr
    else:
        assert f"Slurm knows no job {ids[0]}, and would start this one at once" in well.stderr
    assert failed.returncode == 2
    assert "3" in hpcinit("why", ids[1], env=cluster.env).stdout


@pytest.mark.slurm
def test_one_question_for_all(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """Runs, a chain and a sweep with their 60 jobs cost one squeue, for `all` as for their names."""
    held = (*SMALL, "+cluster.sbatch.hold=true")
    submit(hpcinit, idle_slurm, *SMALL, "nodes=4", "--", "sleep", "600")
    submit(hpcinit, idle_slurm, *held, "chain=3", "name=long", "--", "true")
    submit(hpcinit, idle_slurm, "-m", "seed=range(0,50)", *held, "--", "true")
    for _ in range(5):
        done = submit(hpcinit, idle_slurm, *held, "again=true", "name=held", "--", "true")
        assert done.returncode == 0, done.stderr
    env, questions = counted(tmp_path)
    now = told(hpcinit, idle_slurm, "all", **env)
    assert questions.read_text().split() == ["squeue"]
    assert len(now) == 57 and {run["source"] for run in now} == {"squeue"}
    assert now[1]["link"] == "job 1 of a chain of 3" and len(now[1]["others"]) == 2
    assert [run["meaning"] for run in now[-5:]] == ["held; scontrol release JOB lets it go"] * 5
    shown = hpcinit("status", "long-0001", "true-0001", "held-0001", env={**idle_slurm.env, **env}).stdout
    assert questions.read_text().split() == ["squeue"] * 2
    assert len(shown.splitlines()) == 2 + 52 + 2, shown


@pytest.mark.slurm
def test_jobs_of_somebody_else(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """A colleague's runs are found as well, in two questions more."""
    ids = [
        idle_slurm.run(
            "setpriv",
            "--reuid=65534",
            "--clear-groups",
            "sbatch",
            "--parsable",
            "--chdir=/",
            "--output=/dev/null",
            "--wrap=sleep 600",
        ).strip()
        for _ in range(2)
    ]
    for job_id in ids:
        recorded(tmp_path / "runs", "theirs", job_id)
    until(lambda: {run["name"] for run in told(hpcinit, idle_slurm)} == {"RUNNING"})
    env, questions = counted(tmp_path)
    now = told(hpcinit, idle_slurm, **env)
    assert [(run["job_id"], run["source"]) for run in now] == [(job_id, "scontrol") for job_id in ids]
    assert questions.read_text().split() == ["squeue", "sacct", "scontrol"]
    assert told(hpcinit, idle_slurm, ids[0])[0]["source"] == "squeue"


@pytest.mark.parametrize(
    ("word", "left", "name", "over"),
    [
        ("FROZEN_TOMORROW", None, "FROZEN_TOMORROW", False),
        ("FROZEN_TOMORROW", 0, "COMPLETED", True),
        ("FROZEN_TOMORROW", 3, "FAILED", True),
        ("COMPLETING", 3, "COMPLETING", False),
    ],
)
def test_a_word_of_tomorrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, left: int | None, name: str, over: bool
) -> None:
    """A state that this version does not know is shown as it is; whether the job is over, its own record says.

    squeue is played: no Slurm of today has such a word.
    """
    path = recorded(tmp_path, "x", "77")
    if left is not None:
        (path / "exit.json").write_text(json.dumps({"job": "77", "exit_status": left}))
    monkeypatch.setattr(queue, "_lines", lambda *_: [squeue_line("77", word, elapsed="1-02:03:04", left="UNLIMITED")])
    now = state.read(path)
    assert (now.name, now.over, now.exit_status if over else None) == (name, over, left if over else None)
    assert ("Slurm says FROZEN_TOMORROW" in now.reason) == over


@pytest.mark.parametrize(("word", "status"), [("COMPLETED", 0), ("FAILED", 3)])
def test_an_end_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, status: int) -> None:
    """A job that ends after its record was looked for and before Slurm answers has its exit status all the same.

    squeue is played: it takes a moment that cannot be hit.
    """
    path = recorded(tmp_path, "x", "77")
    folder.mark_submitted(path, {"job_id": "77", "engine": "slurm", "command": ["sbatch", "x"]})

    def answer(*_: object) -> list[str]:
        (path / "exit.json").write_text(json.dumps({"job": "77", "exit_status": status}))
        return [squeue_line("77", word)]

    monkeypatch.setattr(queue, "_lines", answer)
    assert state.read(path).exit_status == status and follow(path) == status


@pytest.mark.parametrize(
    ("restart", "status", "name"),
    [(1, 0, "COMPLETED"), (1, 3, "FAILED"), (1, 143, "PREEMPTED"), (0, 0, "PREEMPTED"), (0, 3, "PREEMPTED")],
)
def test_preempted_and_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: int, status: int, name: str
) -> None:
    """Slurm 24.11 goes on saying PREEMPTED of a job whose later attempt ended by itself; a first attempt's, and one
    that was told to end, is what Slurm says. Played; the real one is in test_preempted_with_a_grace_time."""
    path = recorded(tmp_path, "x", "77")
    (path / "exit.json").write_text(json.dumps({"job": "77", "restart": restart, "exit_status": status}))
    monkeypatch.setattr(queue, "_lines", lambda *_: [squeue_line("77", "PREEMPTED")])
    now = state.read(path)
    assert (now.name, now.exit_status) == (name, status)


def test_accounts_that_are_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that only sacct takes for running is not waited for for ever. Played: it takes a lost message."""

    def answer(command: tuple[str, ...], _: object) -> list[str]:
        return ["77|RUNNING|0:0|2026-11-21T13:00:00|12"] if command[0] == "sacct" else []

    monkeypatch.setattr(queue, "_lines", answer)
    now = state.read(recorded(tmp_path, "x", "77"))
    assert now.forgotten and now.reason == "sacct says RUNNING, the controller does not know the job"


@pytest.mark.parametrize(
    ("word", "status"),
    [("COMPLETED|0:0", 0), ("FAILED|3:0", 3), ("CANCELLED by 0|0:15", 143), ("CANCELLED by 0|0:0", None)],
)
def test_exit_statuses_of_sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, status: int | None) -> None:
    """A job that was cancelled while it waited has no exit status, although sacct says 0:0. Played, as sacct said it."""
    line = f"77|{word}|None|0"
    monkeypatch.setattr(queue, "_lines", lambda command, _: [line] if command[0] == "sacct" else [])
    now = state.read(recorded(tmp_path, "x", "77"))
    assert (now.name, now.exit_status) == (word.split("|", maxsplit=1)[0].split(maxsplit=1)[0], status)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("2:03:04", 7384),
        ("3:04", 184),
        ("12", 12),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_slurms_times(text: str, seconds: int | None) -> None:
    """Times as squeue and sacct write them."""
    assert queue.seconds(text) == seconds
