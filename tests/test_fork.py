"""launch=fork on the real Slurm: the ranks' environment, signals, failures, and another attempt."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpcinit.records import timeline
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import begin_now, restarts, state
from tests.submitting import folder_of, job_id_of, submit
from tests.waiting import until

pytestmark = pytest.mark.slurm

PRINTS = """
import json, os, signal, time
received = []
signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
rank = int(os.environ['RANK'])
print('ready', flush=True)
while not os.path.exists('go'):
    time.sleep(0.05)
    if received: open(f'received-{rank}', 'w').close()
print(json.dumps([len(received), {n: v for n, v in os.environ.items() if n.startswith(('SLURM', 'CUDA_', 'GPU_', 'PMI'))}]))
"""
# Variables of one step or one process, which differ by nature. A binding is the fork server's.
OWN = {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_TASK_PID", "SLURM_STEP_LAUNCHER_PORT", "SLURM_SRUN_COMM_PORT",
       "SLURM_JOB_NAME", "SLURM_STEP_RESV_PORTS", "SLURM_TOPOLOGY_ADDR", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME",
       "SLURM_JOB_SLUID"}  # fmt: skip


def printed(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"logs/rank-{rank}.log").read_text().splitlines()[-1])


def variables(folder: Path, rank: int) -> dict[str, str]:
    return {n: v for n, v in printed(folder, rank)[1].items() if n not in OWN and not n.startswith("SLURM_CPU_BIND")}


def test_a_forked_rank_is_told_what_srun_tells_a_task(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Forked ranks have Slurm's variables with the same values as tasks, GPUs too. A signal of Slurm reaches each rank
    once, and a suspended job continues."""
    slurm = idle_slurm
    (tmp_path / "tells.py").write_text(PRINTS)
    words = ["nodes=2", "ranks_per_node=2", "parallel=ddp", "--", "tells.py"]
    forked = folder_of(submit(hpcinit, slurm, "launch=fork", "launch.preload=[]", *words))
    logs = [forked / f"logs/rank-{rank}.log" for rank in range(4)]
    until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), timeout_s=120)
    job = json.loads((forked / "submission.json").read_text())["job_id"]
    slurm.run("scancel", "--signal=USR1", f"{job}.0")
    until(lambda: len(list(tmp_path.glob("received-*"))) == 4)
    slurm.run("scontrol", "suspend", job)
    time.sleep(2)  # the fork server checks once a second; a second copy of a signal would arrive within 0.3 s
    slurm.run("scontrol", "resume", job)
    (tmp_path / "go").touch()
    until(lambda: state(slurm, job) == "COMPLETED", timeout_s=120)
    assert [printed(forked, rank)[0] for rank in range(4)] == [1, 1, 1, 1]
    plain = folder_of(submit(hpcinit, slurm, "wait=true", *words, timeout=240))
    for rank in range(4):
        assert variables(forked, rank) == variables(plain, rank)


DIES = """
import os, time, hpcinit
with hpcinit.session() as run:
    for step in range(1, 1000):
        run.progress(step, 1000)
        if run.rank == 3 and step == 4: os.kill(os.getpid(), 9)
        time.sleep(0.1)
"""


def test_kill_9_of_a_forked_rank(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Slurm gets the rank's status, `hpcinit why` names the rank and not the fork server, and the others are gone. The
    timeline of the start has the fork server's events for both ranks of a node."""
    (tmp_path / "train.py").write_text(DIES)
    done = submit(
        hpcinit, slurm, "launch=fork", "nodes=2", "ranks_per_node=2", "wait=true", "--", "train.py", timeout=240
    )
    log = (folder_of(done) / "logs/job.log").read_text()
    # srun reports the highest status of all tasks: its own SIGTERM to the other node may be higher.
    assert done.returncode in (137, 143), done.stdout + done.stderr
    assert "hpcinit: error: n2: rank 3: Killed\n" in log and "hpcinit: stopping rank 2 on n2 too, b" in log
    assert "srun: error: n2: task 1: Killed" in log
    assert "rank 3 on n2 was killed by a signal (Killed) first (step " in done.stdout + done.stderr
    (attempt,) = timeline.read(folder_of(done))
    assert attempt.complete
    for rank in attempt.ranks:
        names = ["allocated", "started", "interpreter", "forked", "met", "imported"]
        assert list(rank.events)[: len(names)] == names
        assert list(rank.events.values()) == sorted(rank.events.values())
        neighbour = attempt.ranks[rank.rank ^ 1]
        assert all(abs(rank.events[name] - neighbour.events[name]) < 0.02 for name in ("started", "interpreter"))
    assert "  fork server imports, forks  " in hpcinit("report", folder_of(done).name).stdout


HANGS = """
import os, signal, time, hpcinit
first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
with hpcinit.session() as run:
    for step in range(1, 20):
        if run.rank == 1 and step == 4 and first: os.kill(os.getpid(), signal.SIGSTOP)
        run.progress(step, 20)
        run.should_stop()
        time.sleep(0.1)
print("through")
"""


def test_a_hang_of_forked_ranks_is_requeued(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The fork server passes exit status 76 on, and the next attempt, forked too, appends to the logs and succeeds."""
    (tmp_path / "train.py").write_text(HANGS)
    words = [
        "launch=fork",
        "nodes=2",
        "ranks_per_node=2",
        "hang.after_s=5",
        "hang.action=end",
        "restart.max_restarts=1",
    ]
    done = submit(hpcinit, idle_slurm, *words, "--", "train.py")
    folder, job = folder_of(done), job_id_of(done)
    until(lambda: restarts(folder), timeout_s=180)
    assert restarts(folder)[0][:2] == (1, "hang")
    until(lambda: state(idle_slurm, job) == "PENDING", timeout_s=60)
    begin_now(idle_slurm, job)
    until(lambda: state(idle_slurm, job) == "COMPLETED", timeout_s=180)
    assert all("through" in (folder / f"logs/rank-{rank}.log").read_text() for rank in range(4))
