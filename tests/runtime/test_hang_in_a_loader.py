"""A hang whose cause is a DataLoader worker: the rank that waits for it is alive, and the verdict names the worker."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.submitting import folder_of
from tests.waiting import until

# The worker of rank 1 hangs. In 'first', at the first batch: rank 1 has reported no step, and the others have.
PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
import hpcinit
how = sys.argv[1]
run = hpcinit.init()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if run.rank == 1 and index == (0 if how == "first" else 40):
            open("worker", "w").write(str(os.getpid()))
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        return torch.ones(1)

def train():
    for step, batch in enumerate(torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")):
        if step >= 4:
            dist.all_reduce(batch)
        run.progress(step, 1000)
        time.sleep(0.05)
train()
"""
STATES = {"later": "sleeps", "first": "sleeps", "stopped": "is stopped"}


@pytest.mark.parametrize("how", ["later", *(pytest.param(how, marks=pytest.mark.more) for how in ("first", "stopped"))])
def test_the_rank_that_waits_for_its_worker(hpcinit: Run, tmp_path: Path, how: str) -> None:
    """`why` names the rank, the worker's process and what the kernel shows of it, and calls no process dead."""
    (tmp_path / "train.py").write_text(PROGRAM)
    # A rank once died of a segmentation fault at its start, and no log showed where.
    words = [
        "submit",
        "cluster=local",
        "ranks_per_node=2",
        "hang.after_s=2",
        "+job.env.PYTHONFAULTHANDLER=1",
        "--",
        "train.py",
        how,
    ]
    run = folder_of(hpcinit(*words))
    try:
        with contextlib.suppress(AssertionError):  # the assertions below show more
            until(lambda: "the training hung" in hpcinit("why", str(run)).stdout, 150)
        text = hpcinit("why", str(run)).stdout
        logs = "".join(f"\n{path.name}:\n{path.read_text()}" for path in sorted(run.rglob("*.log")))
        found = json.loads(hpcinit("why", "--json", str(run)).stdout)
        worker = (tmp_path / "worker").read_text()
        assert re.match(
            rf"the training hung: rank 1 on \S+ waits for its DataLoader worker \(pid {worker}, which {STATES[how]}.*\), "
            r"at train.py:20 in train",
            text,
        ), text + logs
        assert "dead or unresponsive" not in text and "wrote no stack" not in text, text
        assert f"py-spy dump --pid {worker}" in text, text
        assert (found["rank"], found["kind"]) == (1, "hang"), found
    finally:
        hpcinit("cancel", str(run))
