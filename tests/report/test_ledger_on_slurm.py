"""`hpcinit report` after a preemption and a failure on the real Slurm adds up to what Slurm charged."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hpcinit.report import ledger
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import begin_now, finish, log, state
from tests.submit.test_restart_training import rank_on
from tests.submitting import folder_of, job_id_of, submit
from tests.waiting import until

TRAIN = """
import time, torch, hpcinit
run = hpcinit.init()
model = run.wrap(torch.nn.Linear(64, 64), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
found = run.load(model, run.folder / "checkpoints")
for step in range(found.step + 1 if found else 1, 61):
    time.sleep(0.3)
    run.progress(step, 60)
    if step == 30:
        with run.phase("evaluating"):
            time.sleep(3)
    if step % 15 == 0:
        run.save(model, run.folder / "checkpoints", step)
"""


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_a_preemption_and_a_killed_rank(hpcinit: Run, tmp_path: Path) -> None:
    """Each attempt is within 1 s of sacct's elapsed time, the rows add up, and less than 2 % are unknown."""
    (tmp_path / "train.py").write_text(TRAIN)
    with MiniSlurm(nodes=2, gpus=0, accounting=True, name=f"pytest-{os.getpid()}-ledger") as slurm:
        asked = ["nodes=2", "ranks_per_node=1", "cluster.gpus_per_node=0", "restart.max_restarts=3"]
        done = submit(hpcinit, slurm, *asked, "restart.on=[failure]", "--", "train.py")
        folder, job = folder_of(done), job_id_of(done)

        def step() -> int:
            path = folder / "progress.json"
            return json.loads(path.read_text())["step"] if path.exists() else 0

        until(lambda: step() >= 20, 120)
        slurm.run("sbatch", "-N2", "--exclusive", "--partition=high", "--wrap=sleep 1")
        until(lambda: state(slurm, job) == "PENDING")
        until(lambda: begin_now(slurm, job) or step() >= 40, 240)
        os.kill(rank_on(slurm, "n2", folder), signal.SIGKILL)
        assert finish(slurm, job, 300) == "COMPLETED", log(folder)
        sacct = ("sacct", "-X", "-D", "-n", "-P", f"-j{job}", "--format=ElapsedRaw,Start")
        until(lambda: slurm.run(*sacct).count("\n") == 3, 60)
        elapsed = [
            int(row.split("|")[0]) for row in sorted(slurm.run(*sacct).split(), key=lambda row: row.split("|")[1])
        ]
        found = json.loads(hpcinit("report", "--json", folder.name, env=slurm.env).stdout)
        text = hpcinit("report", folder.name, env=slurm.env).stdout
        print(text)
    attempts = [one["charged_s"] for one in found["attempts"]]
    assert len(attempts) == 3 and all(abs(a - b) <= 1 for a, b in zip(attempts, elapsed, strict=True)), text
    rows = {row["name"]: row["seconds"] for row in found["rows"]}
    charged = sum(seconds for name, seconds in rows.items() if name != ledger.QUEUE)
    assert abs(charged - sum(elapsed)) <= 0.005 * sum(elapsed) and rows[ledger.UNKNOWN] <= 0.02 * charged, text
    assert [one["reason"] for one in found["attempts"]] == ["slurm", "failure", ""]
    # Steps 16 to at least 20 and 31 to at least 40, with 0.3 s each; the record lacks the last second of each, or more
    # on a busy machine.
    assert 0.3 * 5 <= rows[ledger.REPEATED] < 30 and 2.9 <= rows[ledger.PHASES] < 12, text
    assert rows[ledger.KEPT] >= 60 * 0.3 - 1 and rows[ledger.SAVE] > 0 and rows[ledger.RESTORE] > 0, text
