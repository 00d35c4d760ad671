"""A job continues after Slurm suspended and resumed it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import state
from tests.submitting import folder_of, job_id_of, printed, submit
from tests.waiting import until

TRAIN = """
import pathlib, time
import torch, torch.distributed as dist
import hpcinit
with hpcinit.session() as run:
    step = 0
    while not pathlib.Path("finish").exists() or step < 100:
        before = time.monotonic()
        time.sleep(0.1)
        if time.monotonic() - before > 10: time.sleep(3.5)  # slow after the resume
        dist.all_reduce(torch.ones(1))
        step += 1
        run.progress(step, 10000)
        if step == 30: print("up", flush=True)
        if stop := run.should_stop(): print(stop, flush=True)
        if stop: break
    time.sleep(3)  # the last check of the monitoring threads
    print("done", flush=True)
"""


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_a_suspended_job_does_not_hang(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """scontrol suspend for five times hang.after_s is not a hang: with hang.action=end the ranks continue and complete."""
    slurm = idle_slurm
    (tmp_path / "train.py").write_text(TRAIN)
    asked = ["nodes=2", "ranks_per_node=2", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null"]
    done = submit(hpcinit, slurm, *asked, "hang.after_s=4", "hang.action=end", "--", "train.py")
    folder, job = folder_of(done), job_id_of(done)
    logs = [folder / f"logs/rank-{rank}.log" for rank in range(4)]
    until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    slurm.run("scontrol", "suspend", job)
    time.sleep(20)
    slurm.run("scontrol", "resume", job)
    (tmp_path / "finish").touch()
    until(lambda: state(slurm, job) not in ("RUNNING", "SUSPENDED", "COMPLETING"), 120)
    assert state(slurm, job) == "COMPLETED", "".join(log.read_text() for log in logs)
    assert not list(folder.glob("hang/*/*")) and "done" in printed(folder, 0)
