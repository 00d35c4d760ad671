"""States of runs on the real Slurm: with and without accounting, before and after it purges jobs."""

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
def purging(request: pytest.FixtureRequest) -> Iterator[MiniSlurm]:
    """A cluster that purges a job 2 s after its end (it checks once a minute)."""
    require_slurm(accounting=request.param)
    name = f"seen-{os.getpid()}-{int(request.param)}"
    with MiniSlurm(nodes=1, gpus=0, accounting=request.param, name=name, options={"MinJobAge": "2"}) as cluster:
        yield cluster
        cluster.start_controller()


def statuses(hpcinit: Run, cluster: MiniSlurm, *arguments: str, **env: str) -> list[dict[str, Any]]:
    done = hpcinit("status", "--json", *arguments, env={**cluster.env, **env})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def counting_queries(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Return an environment with wrappers of squeue, sacct and scontrol, and the file that lists their calls."""
    (tmp_path / "counting").mkdir()
    log = tmp_path / "queries"
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
def test_after_slurm_purged_a_job(purging: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """The state is right after the controller purged the job, and while it is down; sacct adds to it."""
    accounting = purging.shape.accounting
    for program in (("sh", "-c", "exit 0"), ("sh", "-c", "exit 3"), ("sleep", "600")):
        submit(hpcinit, purging, *SMALL, "--", *program)
    until(lambda: statuses(hpcinit, purging, "sleep-0001")[0]["state"] == "RUNNING")
    [running] = statuses(hpcinit, purging, "sleep-0001", SQUEUE_PARTITION="high", SLURM_TIME_FORMAT="relative")
    assert running["source"] == "squeue" and 0 <= running["elapsed_s"] < 100 and 400 < running["left_s"] <= 600
    assert running["start"][:2] == "20" and running["start"][10] == "T"
    until((end := tmp_path / "runs/sleep-0001/exit.json").exists)
    os.kill(json.loads(end.read_text())["pid"], signal.SIGKILL)  # the batch shell
    until(lambda: not purging.run("squeue", "--noheader", "--states=all", "--me"))
    end = ["COMPLETED", "FAILED", "FAILED" if accounting else "UNKNOWN"]
    now = statuses(hpcinit, purging, "all")
    assert [run["state"] for run in now] == end
    assert [run["exit_status"] for run in now] == [0, 3, 137 if accounting else None]
    assert {run["source"] for run in now} == ({"sacct"} if accounting else {"exit.json", ""})
    if not accounting:
        assert "no exit status is recorded" in now[2]["reason"]
    _check_dependency(hpcinit, purging, [run["job_id"] for run in now[:2]])
    submit(hpcinit, purging, *SMALL, "--", "sleep", "600")
    until(lambda: statuses(hpcinit, purging, "sleep-0002")[0]["state"] == "RUNNING")
    until(lambda: ".0 " in purging.run("squeue", "--steps", "--noheader"))  # srun needs the controller until then
    if accounting:  # accounting records a start a little later
        until(lambda: "RUNNING" in purging.run("sacct", "--noheader", "-X", "--format=State"))
    purging.stop_controller()
    env, queries = counting_queries(tmp_path)
    now = statuses(hpcinit, purging, **env)
    purging.start_controller()
    assert [run["state"] for run in now] == [*end, "RUNNING" if accounting else "UNKNOWN"]
    assert [run["exit_status"] for run in now[:2]] == [0, 3]
    assert now[3]["reason"].startswith("from sacct; squeue: " if accounting else "squeue: ")
    assert queries.read_text().split() == ["squeue", "sacct"]
    assert statuses(hpcinit, purging, "sleep-0002")[0]["state"] == "RUNNING"
    purging.cancel_all()


def _check_dependency(hpcinit: Run, cluster: MiniSlurm, ids: list[str]) -> None:
    """A dependency on a job that only sacct knows works; one on an unknown job is refused.

    ids: a job that succeeded, and one that ended with exit status 3, which `why` prints.
    """
    well, failed = (submit(hpcinit, cluster, f"dependency=afterok:{job}", "dry_run=true", "--", "true") for job in ids)
    if cluster.shape.accounting:
        assert well.returncode == 0 and "--dependency" not in well.stdout, well.stderr
        assert (
            f"dependency=afterok:{ids[1]}: job {ids[1]} ended as FAILED, so this job would never start" in failed.stderr
        )
    else:
        assert f"Slurm has no record of job {ids[0]} and would start this job at once" in well.stderr
    assert failed.returncode == 2
    assert "3" in hpcinit("why", ids[1], env=cluster.env).stdout


@pytest.mark.slurm
def test_one_query_for_all_runs(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """The states of runs, a chain and a sweep with 60 jobs cost one squeue, for `all` and for their names."""
    on_hold = (*SMALL, "+cluster.sbatch.hold=true")
    submit(hpcinit, idle_slurm, *SMALL, "nodes=4", "--", "sleep", "600")
    submit(hpcinit, idle_slurm, *on_hold, "chain=3", "name=long", "--", "true")
    submit(hpcinit, idle_slurm, "-m", "seed=range(0,50)", *on_hold, "--", "true")
    for _ in range(5):
        done = submit(hpcinit, idle_slurm, *on_hold, "again=true", "name=waiting", "--", "true")
        assert done.returncode == 0, done.stderr
    env, queries = counting_queries(tmp_path)
    now = statuses(hpcinit, idle_slurm, "all", **env)
    assert queries.read_text().split() == ["squeue"]
    assert len(now) == 57 and {run["source"] for run in now} == {"squeue"}
    assert now[1]["link"] == "job 1 of a chain of 3" and len(now[1]["others"]) == 2
    assert [run["meaning"] for run in now[-5:]] == ["held by the user; release it with: scontrol release JOB"] * 5
    shown = hpcinit("status", "long-0001", "true-0001", "waiting-0001", env={**idle_slurm.env, **env}).stdout
    assert queries.read_text().split() == ["squeue"] * 2
    assert len(shown.splitlines()) == 1 + 51 + 1 + 1 and shown.count("held by the user") == 1, shown


@pytest.mark.slurm
def test_jobs_of_another_user(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """The states of another user's runs cost two more queries."""
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
    until(lambda: {run["state"] for run in statuses(hpcinit, idle_slurm)} == {"RUNNING"})
    env, queries = counting_queries(tmp_path)
    now = statuses(hpcinit, idle_slurm, **env)
    assert [(run["job_id"], run["source"]) for run in now] == [(job_id, "scontrol") for job_id in ids]
    assert queries.read_text().split() == ["squeue", "sacct", "scontrol"]
    assert statuses(hpcinit, idle_slurm, ids[0])[0]["source"] == "squeue"


@pytest.mark.parametrize(
    ("word", "left", "name", "over"),
    [
        ("FROZEN_TOMORROW", None, "FROZEN_TOMORROW", False),
        ("FROZEN_TOMORROW", 0, "COMPLETED", True),
        ("FROZEN_TOMORROW", 3, "FAILED", True),
        ("COMPLETING", 3, "COMPLETING", False),
    ],
)
def test_a_state_that_this_version_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, left: int | None, name: str, over: bool
) -> None:
    """An unknown state is shown unchanged; the exit record decides whether the job is over.

    squeue is a fake: no current Slurm has such a state.
    """
    path = recorded(tmp_path, "x", "77")
    if left is not None:
        (path / "exit.json").write_text(json.dumps({"job": "77", "exit_status": left}))
    monkeypatch.setattr(queue, "_lines", lambda *_: [squeue_line("77", word, elapsed="1-02:03:04", left="UNLIMITED")])
    now = state.read(path)
    assert (now.name, now.over, now.exit_status if over else None) == (name, over, left if over else None)
    assert ("Slurm reports FROZEN_TOMORROW" in now.reason) == over


@pytest.mark.parametrize(("word", "status"), [("COMPLETED", 0), ("FAILED", 3)])
def test_a_job_that_ends_between_reading_and_querying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, status: int
) -> None:
    """A job that ends after its folder was read and before Slurm replies still has its exit status.

    squeue is a fake: a test cannot hit this moment.
    """
    path = recorded(tmp_path, "x", "77")
    folder.mark_submitted(path, {"job_id": "77", "engine": "slurm", "command": ["sbatch", "/runs/x/job.sh"]})

    def answer(*_: object) -> list[str]:
        (path / "exit.json").write_text(json.dumps({"job": "77", "exit_status": status}))
        return [squeue_line("77", word)]

    monkeypatch.setattr(queue, "_lines", answer)
    assert state.read(path).exit_status == status and follow(path) == status


@pytest.mark.parametrize(
    ("restart", "status", "name"),
    [(1, 0, "COMPLETED"), (1, 3, "FAILED"), (1, 143, "PREEMPTED"), (0, 0, "PREEMPTED"), (0, 3, "PREEMPTED")],
)
def test_preempted_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: int, status: int, name: str
) -> None:
    """The record of a later attempt overrides PREEMPTED, which Slurm 24.11 keeps reporting after a restart.

    Slurm's state counts for a first attempt and for one that a signal ended. squeue is a fake; the real case is
    test_preempted_with_a_grace_time.
    """
    path = recorded(tmp_path, "x", "77")
    (path / "exit.json").write_text(json.dumps({"job": "77", "restart": restart, "exit_status": status}))
    monkeypatch.setattr(queue, "_lines", lambda *_: [squeue_line("77", "PREEMPTED")])
    now = state.read(path)
    assert (now.name, now.exit_status) == (name, status)


def test_accounting_that_missed_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that runs only according to sacct is not waited for forever. sacct is a fake: it takes a lost message."""

    def answer(command: tuple[str, ...], *_: object) -> list[str]:
        return ["77|RUNNING|0:0|2026-11-21T13:00:00|12|"] if command[0] == "sacct" else []

    monkeypatch.setattr(queue, "_lines", answer)
    now = state.read(recorded(tmp_path, "x", "77"))
    assert now.purged and now.reason == "sacct reports RUNNING, but the controller does not know the job"


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("COMPLETED|0:0", 0),
        ("FAILED|3:0", 3),
        ("CANCELLED by 0|0:15", 143),
        ("CANCELLED by 0|0:0", None),
        ("CANCELLED by 54321|0:0", None),
    ],
)
def test_exit_statuses_of_sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, status: int | None) -> None:
    """A job that was cancelled while it waited has no exit status, although sacct prints 0:0. Recorded output."""
    line = f"77|{word}|None|0|"
    monkeypatch.setattr(queue, "_lines", lambda command, *_: [line] if command[0] == "sacct" else [])
    now = state.read(recorded(tmp_path, "x", "77"))
    assert (now.name, now.exit_status) == (word.split("|", maxsplit=1)[0].split(maxsplit=1)[0], status)
    assert now.reason == ("by root" if " by 0" in word else "by user 54321" if "by" in word else "")


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
def test_times_of_slurm(text: str, seconds: int | None) -> None:
    """Times of squeue and sacct are converted to seconds."""
    assert queue.seconds(text) == seconds


def test_a_finished_run_does_not_wait_long_for_slurm(hpcinit: Run, tmp_path: Path) -> None:
    """If Slurm does not answer, status shows what the run folder records, marked, without waiting for three commands."""
    for name in ("squeue", "sacct", "scontrol"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text("#!/bin/sh\nexec sleep 600\n")
        command.chmod(0o755)
    folder = recorded(tmp_path / "runs", "done", "7")
    (folder / "job.sh").touch()
    (folder / "exit.json").write_text('{"job": "7", "pid": 1, "restart": 0, "ended": 1, "exit_status": 0}')
    # 20 s: less than the 30 s that each of the commands may take otherwise.
    done = hpcinit("status", str(folder), env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}, timeout=20)
    assert "COMPLETED" in done.stdout and "did not answer in 5 s" in done.stdout + done.stderr, done
