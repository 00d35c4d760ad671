"""`hpcinit why` after real faults on a real Slurm: the first line that a user reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail
from tests.submit.test_restart import begin_now
from tests.submitting import folder_of, job_id_of, submit
from tests.waiting import until

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
import hpcinit
how = sys.argv[1]
run = hpcinit.init()
if how == "skew" and run.rank >= 2:  # the clock of the second node is 2 s ahead
    right = time.time
    time.time = lambda: right() + 2
for step in range(100000):
    dist.all_reduce(torch.ones(1))
    if step == 5 and run.rank == 1:
        if how in ("raise", "skew"): raise ValueError("bad sample 17")
        if how == "kill": os.kill(os.getpid(), 9)
        if how == "stop": os.kill(os.getpid(), 19)
        if how == "exit": sys.exit(7)
    run.progress(step, 100000)
    time.sleep(0.05)
"""
SHAPE = ["nodes=2", "ranks_per_node=2", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "launch=fork"]

pytestmark = pytest.mark.slurm


@pytest.fixture
def start(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "train.py").write_text(TRAIN)

    def submitted(how: str, *overrides: str) -> Path:
        return folder_of(submit(hpcinit, idle_slurm, *SHAPE, *overrides, "--", "train.py", how))

    return submitted


def over(hpcinit: Run, slurm: MiniSlurm, folder: Path) -> list[str]:
    """Return the lines of `hpcinit why` after the end of the job."""
    ended = {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "COMPLETED"}
    number = job_id_of_folder(folder)
    until(
        lambda: slurm.run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T").strip() in ended,
        150,
    )
    return hpcinit("why", folder.name, env=slurm.env).stdout.splitlines()


def job_id_of_folder(folder: Path) -> str:
    return str(json.loads((folder / "submission.json").read_text())["job_id"])


def trains(folder: Path) -> bool:
    return (folder / "progress.json").exists()


def test_a_rank_raises(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """The first line is the cause with its step; the three errors that follow from it are counted."""
    folder = start("raise")
    lines = over(hpcinit, idle_slurm, folder)
    assert re.fullmatch(r"rank 1 on n1 failed first, \d\d:\d\d:\d\d \(step 4\): ValueError: bad sample 17", lines[0])
    assert re.match(r'  raised at ".*/train.py", line \d+, in <module>', lines[1])
    found = json.loads(hpcinit("why", "--json", folder.name, env=idle_slurm.env).stdout)
    assert (found["rank"], found["host"], found["step"], found["kind"]) == (1, "n1", 4, "program")
    assert found["secondary"], lines


@pytest.mark.more
def test_clocks_that_differ(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """A clock difference of two seconds between nodes is reported."""
    lines = over(hpcinit, idle_slurm, start("skew", "launch.kill_on_bad_exit=false"))
    assert "rank 1 on n1 failed first" in lines[0]
    assert any(re.search(r"clocks of the nodes differ by (1\.[89]|2\.\d) s \(n2 is ahead\)", line) for line in lines), (
        lines
    )


def test_kill_9_of_a_rank(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """A killed rank writes no record; the first message of srun names it."""
    lines = over(hpcinit, idle_slurm, start("kill", "launch=srun"))
    assert re.fullmatch(r"rank 1 on n1 was killed by a signal \(Killed\) first( \(step \d\))?", lines[0]), lines
    assert any("mem_gb" in line for line in lines)


@pytest.mark.more
def test_an_exit_status(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """sys.exit(7) of one rank is the cause, whichever rank srun reports first."""
    assert over(hpcinit, idle_slurm, start("exit"))[0].endswith("(step 4): SystemExit: 7")


@pytest.mark.more
def test_a_stopped_rank(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """After hang.action=end, the report names the rank that the others wait for."""
    lines = over(hpcinit, idle_slurm, start("stop", "hang.after_s=6", "hang.action=end"))
    assert re.match(r"the training hung: rank 1 on n1 does not respond: process \d+ is stopped \(SIGSTOP", lines[0]), (
        lines
    )


def test_scancel_and_a_running_job(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """A running job has not failed; after scancel, the cancellation is the cause."""
    folder = start("none")
    until(lambda: trains(folder))
    lines = hpcinit("why", folder.name, env=idle_slurm.env).stdout
    assert lines.startswith("the job is RUNNING: nothing has failed  step ")
    idle_slurm.run("scancel", job_id_of_folder(folder))
    assert re.match(
        r"the job was canceled, \d\d:\d\d:\d\d \(step \d+\) \(scancel", over(hpcinit, idle_slurm, folder)[0]
    )


@pytest.mark.more
def test_the_time_limit(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    lines = over(hpcinit, idle_slurm, start("none", "time_min=1"))
    assert re.match(r"the time limit of 1 min ended the job, \d\d:\d\d:\d\d \(step \d+\)$", lines[0]), lines


def test_a_node_is_lost(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """The errors of other ranks are secondary; Slurm's reason for the node is in the next line."""
    folder = start("none", "+cluster.sbatch.no-requeue=true")
    until(lambda: trains(folder))
    idle_slurm.kill_node("n2")
    try:
        lines = over(hpcinit, idle_slurm, folder)
    finally:
        idle_slurm.start_node("n2")
    assert re.match(r"node n2 was lost \(step \d+\): Slurm reports a node failure", lines[0]), lines
    assert lines[1].startswith("  n2: Not responding")


@pytest.mark.more
def test_the_batch_scripts_own_node_is_lost(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """If the first node fails, `why` gets the cause from Slurm. The next attempt reports the restart."""
    folder = start("none", "restart.max_restarts=3", "hang.after_s=600")
    until(lambda: trains(folder) and list(folder.glob("heartbeats/*/n1.json")))
    idle_slurm.kill_node("n1")
    try:
        until(lambda: " waits " in hpcinit("why", folder.name, env=idle_slurm.env).stdout)
        lines = hpcinit("why", folder.name, env=idle_slurm.env).stdout.splitlines()
    finally:
        idle_slurm.start_node("n1")
    job = job_id_of_folder(folder)
    assert re.match(
        rf"job {job} waits (\(\w+\) )?to restart: node n1 was lost \(step \d+\): Slurm reports", lines[0]
    ), lines
    begin_now(idle_slurm, job)
    until((folder / "restarts.jsonl").exists)
    shown = json.loads(hpcinit("status", "--json", folder.name, env=idle_slurm.env).stdout)
    idle_slurm.run("scancel", job)
    assert (shown["restarts"]["left"], shown["restarts"]["attempts"][0]["reason"]) == (2, "slurm"), shown
    assert any("1 restart, 2 left: 1 requeued by Slurm" in line for line in over(hpcinit, idle_slurm, folder))


def test_a_waiting_and_a_successful_run(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """A waiting job has not failed and shows its reason; a successful run is reported as such."""
    waiting = folder_of(submit(hpcinit, idle_slurm, "ranks_per_node=1", "+cluster.sbatch.hold=true", "--", "true"))
    assert re.match(
        r"job \d+ waits \(JobHeldUser\): nothing has failed", hpcinit("why", waiting.name, env=idle_slurm.env).stdout
    )
    idle_slurm.run("scancel", job_id_of_folder(waiting))
    done = submit(hpcinit, idle_slurm, "ranks_per_node=1", "wait=true", "--", "true")
    assert hpcinit("why", job_id_of(done), env=idle_slurm.env).stdout.startswith("nothing failed: the run completed")


SETUP_LINES = {  # override of the config: (the line of the script, exit status, message)
    "cluster.setup=[ls /nowhere,no_such_command_x --now || exit 127]":
        ("no_such_command_x --now || exit 127", 127, "no_such_command_x: command not found"),
    "cluster.setup=[set -eu,source /nowhere/env.sh,echo never]":
        ("source /nowhere/env.sh", 1, "/nowhere/env.sh: No such file or directory"),
    "cluster.modules=[no-such-module/99]": ("module load no-such-module/99", 1, "no-such-module/99"),
}  # fmt: skip


@pytest.mark.parametrize("override", SETUP_LINES)
def test_a_line_of_the_setup_that_ends_the_script(hpcinit: Run, idle_slurm: MiniSlurm, override: str) -> None:
    """The line as the user typed it, its exit status and its message are the verdict."""
    line, status, message = SETUP_LINES[override]
    if "modules" in override and not Path("/etc/profile.d/modules.sh").exists():
        skip_or_fail("no environment modules here: Debian's package environment-modules")
    done = submit(hpcinit, idle_slurm, "ranks_per_node=1", "wait=true", override, "--", "true")
    first = hpcinit("why", folder_of(done).name, env=idle_slurm.env).stdout.splitlines()[0]
    assert f"failed before any rank started: {line}: exit status {status}: " in first
    assert message in first


def test_a_line_of_the_setup_that_fails_before_the_ranks_do(
    hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path
) -> None:
    """If the script continues after the line, the rank's error is the verdict, and the first such line is evidence.
    Commands that may fail, and commands in a file that a line sources, are no such lines."""
    (tmp_path / "settings.sh").write_text("false\ntrue\n")
    setup = "'. ./settings.sh','[ -d /nowhere ] && export A=1','false || true','. /nowhere/env.sh',false"
    words = ["ranks_per_node=1", "wait=true", f"cluster.setup=[{setup}]", "--", "cat", "/nowhere/data"]
    text = hpcinit("why", folder_of(submit(hpcinit, idle_slurm, *words)).name, env=idle_slurm.env).stdout
    assert "/nowhere/data" in text.splitlines()[0]
    assert (
        "a setup line failed before the ranks started: . /nowhere/env.sh: exit status 1: /nowhere/env.sh: No such file"
        in text
    )


@pytest.mark.parametrize("command", ["requeue", pytest.param("requeuehold", marks=pytest.mark.more)])
def test_a_job_that_waits_for_its_restart(hpcinit: Run, idle_slurm: MiniSlurm, command: str) -> None:
    """While a requeued job waits in the queue, `why` never advises a second job on its checkpoints."""
    done = submit(hpcinit, idle_slurm, *SHAPE, "restart.max_restarts=2", "--", "sh", "-c", "echo up; sleep 600")
    folder, job = folder_of(done), job_id_of(done)
    until(lambda: (folder / "logs/rank-0.log").exists() and "up" in (folder / "logs/rank-0.log").read_text())
    idle_slurm.run("scontrol", command, job)
    until(lambda: " PENDING " in hpcinit("status", folder.name, env=idle_slurm.env).stdout)
    lines = hpcinit("why", folder.name, env=idle_slurm.env).stdout.splitlines()
    assert re.match(rf"job {job} waits \(.*\) to restart: the job was requeued, ", lines[0]), lines
    assert not any("submit it again" in line or "hpcinit resubmit" in line for line in lines), lines
    idle_slurm.run("scancel", job)
