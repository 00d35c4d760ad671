"""`hpcinit why` on a real Slurm: faults are made, and the first line that a user reads is asserted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
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
WORDS = ["nodes=2", "ranks_per_node=2", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null"]

pytestmark = pytest.mark.slurm


@pytest.fixture
def start(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "train.py").write_text(TRAIN)

    def submitted(how: str, *words: str) -> Path:
        return folder_of(submit(hpcinit, idle_slurm, *WORDS, *words, "--", "train.py", how))

    return submitted


def over(hpcinit: Run, slurm: MiniSlurm, folder: Path) -> list[str]:
    """Lines of the report, when the job has ended."""
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
    """The cause and its step come first; what the three others raise because of it is counted."""
    folder = start("raise")
    said = over(hpcinit, idle_slurm, folder)
    assert re.fullmatch(r"rank 1 on n1 failed first, \d\d:\d\d:\d\d \(step 4\): ValueError: bad sample 17", said[0])
    assert re.match(r'  raised at ".*/train.py", line \d+, in <module>', said[1])
    found = json.loads(hpcinit("why", "--json", folder.name, env=idle_slurm.env).stdout)
    assert (found["rank"], found["host"], found["step"], found["kind"]) == (1, "n1", 4, "program")
    assert found["secondary"], said


def test_clocks_that_differ(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """Two seconds between two nodes: seen by the times of the files, and said."""
    said = over(hpcinit, idle_slurm, start("skew", "launch.kill_on_bad_exit=false"))
    assert "rank 1 on n1 failed first" in said[0]
    assert any(re.search(r"clocks of the nodes differ by (1\.[89]|2\.\d) s \(n2 is ahead\)", line) for line in said), (
        said
    )


def test_kill_9_of_a_rank(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """It leaves no record; srun's first word names it."""
    said = over(hpcinit, idle_slurm, start("kill"))
    assert re.fullmatch(r"rank 1 on n1 was ended by a signal \(Killed\) first( \(step \d\))?", said[0]), said
    assert any("mem_gb" in line for line in said)


def test_an_exit_status(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """sys.exit(7) of one rank is the cause, whichever rank srun hears of first."""
    assert over(hpcinit, idle_slurm, start("exit"))[0].endswith("(step 4): SystemExit: 7")


def test_a_stopped_rank(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """A hang that is ended by itself is told as one, with the rank that the others wait for."""
    said = over(hpcinit, idle_slurm, start("stop", "hang.after_s=6", "hang.action=end"))
    assert re.match(r"the training hung: rank 1 on n1 cannot be asked: process \d+ is stopped \(SIGSTOP", said[0]), said


def test_scancel_and_a_run_that_goes_on(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """While it runs nothing has failed; afterwards the user's own end is told as that."""
    folder = start("none")
    until(lambda: trains(folder))
    said = hpcinit("why", folder.name, env=idle_slurm.env).stdout
    assert said.startswith("the job is RUNNING: nothing has failed  step ")
    idle_slurm.run("scancel", job_id_of_folder(folder))
    assert re.match(
        r"the job was cancelled, \d\d:\d\d:\d\d \(step \d+\): scancel", over(hpcinit, idle_slurm, folder)[0]
    )


def test_the_time_limit(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    said = over(hpcinit, idle_slurm, start("none", "time_min=1"))
    assert re.match(r"the time limit of 1 min ended the job, \d\d:\d\d:\d\d \(step \d+\)$", said[0]), said


def test_a_node_is_lost(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """The others' errors are echoes of it; Slurm's own reason for the node stands below."""
    folder = start("none", "+cluster.sbatch.no-requeue=true")
    until(lambda: trains(folder))
    idle_slurm.kill_node("n2")
    try:
        said = over(hpcinit, idle_slurm, folder)
    finally:
        idle_slurm.start_node("n2")
    assert re.match(r"node n2 was lost \(step \d+\): Slurm says node failure", said[0]), said
    assert said[1].startswith("  n2: Not responding")


def test_the_batch_scripts_own_node_is_lost(hpcinit: Run, idle_slurm: MiniSlurm, start: Callable[..., Path]) -> None:
    """Nobody of the run is left to say so: Slurm is asked for the nodes of the attempt before, and the job, which waits
    for another, is not said to be well. Its next attempt tells of the restart."""
    folder = start("none", "restart.max_restarts=3", "hang.after_s=600")
    until(lambda: trains(folder) and list(folder.glob("beats/*/n1.json")))
    idle_slurm.kill_node("n1")
    try:
        until(lambda: " waits " in hpcinit("why", folder.name, env=idle_slurm.env).stdout)
        said = hpcinit("why", folder.name, env=idle_slurm.env).stdout.splitlines()
    finally:
        idle_slurm.start_node("n1")
    job = job_id_of_folder(folder)
    assert re.match(
        rf"job {job} waits (\(\w+\) )?to begin again: node n1 was lost \(step \d+\): Slurm says", said[0]
    ), said
    begin_now(idle_slurm, job)
    until((folder / "restarts.jsonl").exists)
    shown = json.loads(hpcinit("status", "--json", folder.name, env=idle_slurm.env).stdout)
    idle_slurm.run("scancel", job)
    assert (shown["restarts"]["left"], shown["restarts"]["attempts"][0]["reason"]) == (2, "slurm"), shown
    assert any("1 restart, 2 left: 1 requeued by Slurm" in line for line in over(hpcinit, idle_slurm, folder))


def test_what_cannot_run_and_what_did(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """A job that waits has not failed, and says why it waits; a run that has ended well says so."""
    waiting = folder_of(submit(hpcinit, idle_slurm, "ranks_per_node=1", "+cluster.sbatch.hold=true", "--", "true"))
    assert re.match(
        r"job \d+ waits \(JobHeldUser\): nothing has failed", hpcinit("why", waiting.name, env=idle_slurm.env).stdout
    )
    idle_slurm.run("scancel", job_id_of_folder(waiting))
    done = submit(hpcinit, idle_slurm, "ranks_per_node=1", "wait=true", "--", "true")
    assert hpcinit("why", job_id_of(done), env=idle_slurm.env).stdout.startswith(
        "nothing failed: the run has ended well"
    )


def test_a_script_that_fails_before_any_rank(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Its last words, and where a command that was not found would come from."""
    done = submit(
        hpcinit,
        idle_slurm,
        "ranks_per_node=1",
        "wait=true",
        "cluster.setup=[no_such_command_x || exit 127]",
        "--",
        "true",
    )
    said = next(line for line in done.stdout.splitlines() if "batch script ended" in line)
    assert "exit status 127 and no rank left an error" in said and "no_such_command_x: command not found" in said
