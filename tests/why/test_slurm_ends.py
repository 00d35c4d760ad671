"""Jobs that a real Slurm preempts, cancels or ends at the time limit: `why` names that, whichever process died first."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.submit.test_restart import state
from tests.submitting import folder_of, job_id_of, submit
from tests.waiting import until

# In 'worker' the rank ignores SIGTERM, and fails because its DataLoader worker dies of it.
PROGRAM = """
import signal, sys, time

class Slow:
    def __len__(self): return 10000
    def __getitem__(self, index):
        time.sleep(0.1)
        return index

if sys.argv[1] == "worker":
    import torch
    batches = iter(torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"))
    signal.signal(signal.SIGTERM, lambda *_: None)
    for batch in batches: print("up", flush=True)
print("up", flush=True)
time.sleep(600)
"""
ENDS = {  # the end: (what ends the job, kind, first line)
    "preemption": ("sbatch -N2 --exclusive --partition=high --output=/dev/null --wrap=true", "preempted",
                   "preempted: a job of higher priority took the nodes"),
    "scancel": ("scancel", "cancelled", "the job was canceled"),
    "time limit": ("", "time-limit", "the time limit"),
}  # fmt: skip
OVER = {"FAILED", "COMPLETED", "CANCELLED", "TIMEOUT", "PREEMPTED"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[MiniSlurm]:
    require_slurm(accounting=True)
    with MiniSlurm(nodes=2, gpus=0, accounting=True, name=f"ends-{os.getpid()}") as cluster:
        cluster.run("scontrol", "update", "PartitionName=main", "GraceTime=60", "PreemptMode=CANCEL")
        yield cluster


@pytest.mark.slurm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "end", ["time limit", *(pytest.param(end, marks=pytest.mark.more) for end in ("preemption", "scancel"))]
)
def test_the_end_is_the_first_cause(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, end: str) -> None:
    """Four jobs: ranks and DataLoader workers that die of SIGTERM, submitted with hpcinit and with sbatch alone."""
    (tmp_path / "train.py").write_text(PROGRAM)
    command, kind, first = ENDS[end]
    minutes = "1" if end == "time limit" else "30"
    jobs: dict[str, tuple[str, str, Path]] = {}  # the case: (job, what `why` reads, a rank's log)
    for dies in ("rank", "worker"):
        shape = [
            "nodes=1",
            "ranks_per_node=1",
            "cluster.gpus_per_node=0",
            "cluster.cpus_per_node=4",
            f"time_min={minutes}",
        ]
        done = submit(hpcinit, slurm, *shape, f"name={dies}", "--", "train.py", dies)
        folder = folder_of(done)
        jobs[dies] = (job_id_of(done), str(folder), folder / "logs/rank-0.log")
        line = f"srun -l --kill-on-bad-exit=1 '{sys.executable}' train.py {dies}"
        options = ["-N1", "-n1", "-c4", f"-t{minutes}", "--no-requeue", "--parsable"]
        job = slurm.run("sbatch", *options, f"--wrap={line}").strip()
        jobs[f"{dies} without hpcinit"] = (job, job, tmp_path / f"slurm-{job}.out")
    for _, _, log in jobs.values():
        until(lambda log=log: log.exists() and "up" in log.read_text(), 300)
    if end == "preemption":
        slurm.run(*command.split())
    wrong = []
    for case, (job, read, log) in jobs.items():
        if end == "scancel":
            slurm.run(command, job)
        until(lambda job=job: state(slurm, job) in OVER, 300)
        found = json.loads(hpcinit("why", read, "--json", env=slurm.env).stdout)
        if (found["kind"], found["rank"]) != (kind, None) or not found["verdict"].startswith(first):
            wrong.append(f"{case}, {state(slurm, job)}: {found['kind']} {found['verdict']}\n{log.read_text()[-2000:]}")
    assert not wrong, "\n".join(wrong)
