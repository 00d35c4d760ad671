"""`hpcinit why` on a real Slurm for programs that never import hpcinit: no output, stacks and CPU time of every rank."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit
from tests.waiting import until

pytestmark = pytest.mark.slurm

# An unchanged script: rank 1 never calls the second all_reduce.
PLAIN = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("ready", flush=True)
def read():
    tries = 0
    while True:
        tries += 1
        found = os.path.exists("go")
        if found:
            break
if dist.get_rank() == 1:
    read()
dist.all_reduce(torch.ones(1))
print("done", flush=True)
"""
SHAPE = ["nodes=2", "ranks_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "hang.after_s=6"]


def advised_stacks(hpcinit: Run, slurm: MiniSlurm, report: str, run: str) -> str:
    """Return what `hpcinit stacks RUN` prints, which the report advises."""
    assert "hpcinit stacks RUN" in report, report
    done = hpcinit("stacks", run, env=slurm.env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_unchanged_script_that_hangs(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """`why` reports that no rank prints, the rank that differs, its line, and the CPU time of each rank, and advises
    `hpcinit stacks RUN`; after more output it reports no hang, and the run completes."""
    (tmp_path / "plain.py").write_text(PLAIN)
    folder = folder_of(submit(hpcinit, idle_slurm, *SHAPE, "--", "plain.py"))

    def report() -> str:
        return hpcinit("why", folder.name, env=idle_slurm.env).stdout

    reports: list[str] = []

    def hangs() -> bool:
        reports.append(report())
        return "the ranks seem to hang" in reports[-1]

    until(hangs, pause_s=2)
    lines = reports[-1].splitlines()
    assert re.fullmatch(
        r"the ranks seem to hang: rank 1 on n2 is not in a collective: it is at plain.py:(9|10|11|12) in read; "
        r"no rank has printed anything for \d+ s",
        lines[0],
    ), lines
    assert "  rank 0 waits in all_reduce, called at plain.py:16 in <module>" in lines, lines
    [used] = [line for line in lines if "CPU time" in line]
    shares = {int(rank): int(share) for rank, share in re.findall(r"rank (\d) (\d+) %", used)}
    assert shares[1] > shares.get(0, 0), used
    found = json.loads(hpcinit("why", "--json", folder.name, env=idle_slurm.env).stdout)
    assert (found["kind"], found["rank"], found["host"]) == ("hang", 1, "n2")
    stacks = advised_stacks(hpcinit, idle_slurm, reports[-1], folder.name)
    assert "read" in stacks and "all_reduce" in stacks, stacks
    status = hpcinit("status", folder.name, env=idle_slurm.env).stdout
    assert "no rank has printed anything for" in status, status
    (tmp_path / "go").touch()
    until(lambda: "the run completed" in report())
    assert (folder / "logs/rank-1.log").read_text().count("done") == 1


# Rank 1 is in C code that keeps the GIL, and rank 2 is stopped: their threads write no stack.
BLOCKED = """
import ctypes, os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("ready", flush=True)
def keep_gil():
    ctypes.PyDLL(None).sleep(6000)
if dist.get_rank() == 1:
    keep_gil()
if dist.get_rank() == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1))
"""


def test_ranks_that_cannot_write_their_stacks(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """`why` names each with its node and the state of its process, and the line that called C code with the GIL."""
    (tmp_path / "plain.py").write_text(BLOCKED)
    folder = folder_of(submit(hpcinit, idle_slurm, "nodes=3", *SHAPE[1:], "--", "plain.py"))
    reports: list[list[str]] = []

    def hangs() -> bool:
        reports.append(hpcinit("why", folder.name, env=idle_slurm.env).stdout.splitlines())
        print(*reports[-1][:3], sep="\n")  # shown if the test fails
        return "the ranks seem to hang" in "".join(reports[-1][:1])

    try:
        until(hangs, pause_s=2)
        lines = reports[-1]
        assert re.match(
            r"the ranks seem to hang: rank 1 on n2 does not respond: process \d+ runs C code that holds the GIL, called at "
            r"plain.py:8 in keep_gil, so none of its other threads can run; no rank has printed anything for",
            lines[0],
        ), lines
        [stopped] = [line for line in lines if line.startswith("  rank 2 on n3 does not respond: ")]
        assert re.search(
            r"process (\d+) is stopped \(SIGSTOP, or a debugger\); to continue it: kill -CONT \1$", stopped
        )
        assert "  rank 0 waits in all_reduce, called at plain.py:13 in <module>" in lines, lines
    finally:
        hpcinit("cancel", folder.name, env=idle_slurm.env)


def test_a_silent_command(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """For a command that is not Python, `why` reports how long no rank has printed anything, and advises `hpcinit stacks
    RUN`, which shows its process."""
    folder = folder_of(submit(hpcinit, idle_slurm, *SHAPE, "--", "sh", "-c", "echo ready; sleep 600"))

    def report() -> str:
        return hpcinit("why", folder.name, env=idle_slurm.env).stdout

    try:
        until(lambda: "no rank has printed anything for" in report(), pause_s=2)
        assert report().startswith("the job is RUNNING: nothing has failed, but no rank has printed anything for"), (
            report()
        )
        stacks = advised_stacks(hpcinit, idle_slurm, report(), folder.name)
        assert "sleep 600" in stacks, stacks
    finally:
        hpcinit("cancel", folder.name, env=idle_slurm.env)


def test_a_job_that_hpcinit_did_not_submit(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The id of the user's own job is reported as such, with Slurm's state and the script."""
    (tmp_path / "old.sh").write_text("#!/bin/sh\nsleep 100\n")
    job = idle_slurm.run("sbatch", "--parsable", "--hold", f"--chdir={tmp_path}", str(tmp_path / "old.sh")).strip()
    done = hpcinit("why", job, env=idle_slurm.env)
    assert done.returncode == 2
    assert f"job {job} is not a run of hpcinit in " in done.stderr, done.stderr
    assert f"Slurm reports it as PENDING, with the script {tmp_path}/old.sh" in done.stderr, done.stderr
