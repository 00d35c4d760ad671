"""`hpcinit why` of a rank that Slurm killed for its memory: the numbers of Slurm's accounting."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.slurm import memory_use, slurm_client
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.submitting import folder_of, submit
from tests.waiting import until

# Rank 1 keeps 600 MB, twice what the job requests, until Slurm's accounting sees it.
PROGRAM = """
import os, time
kept = b"x" * (600 * 2**20) if os.environ["RANK"] == "1" else b""
time.sleep(600)
"""


@pytest.fixture(scope="module")
def killing() -> Iterator[MiniSlurm]:
    """A cluster with a database that ends steps above their memory, which it samples every second."""
    require_slurm(accounting=True)
    options = {
        "JobAcctGatherParams": "OverMemoryKill",
        "JobAcctGatherFrequency": "task=1",
        "SelectTypeParameters": "CR_Core_Memory",  # else Slurm sets no limit
    }
    with MiniSlurm(nodes=2, gpus=0, accounting=True, name=f"memory-{os.getpid()}", options=options) as cluster:
        yield cluster


@pytest.mark.slurm
def test_a_rank_killed_for_its_memory(hpcinit: Run, killing: MiniSlurm, tmp_path: Path) -> None:
    """The verdict names the task with the most memory, what it used, and the request."""
    (tmp_path / "train.py").write_text(PROGRAM)
    words = [
        "nodes=2",
        "ranks_per_node=1",
        "mem_gb=0.3",
        "cluster.gpus_per_node=0",
        "cluster.gpu_flag=null",
        "time_min=2",
        "wait=true",
    ]
    done = submit(hpcinit, killing, *words, "--", "train.py")
    assert done.returncode != 0, done.stdout
    run = str(folder_of(done))
    shown: list[str] = []

    def known() -> bool:  # the database gets the end of a step a moment later
        shown[:] = [hpcinit("why", run, env=killing.env).stdout]
        return "Slurm's accounting" in shown[0]

    until(known)
    found = re.search(
        r"Slurm's accounting: task 1 on n2 used up to (\d+) MB; the job requested 308 MB per node", shown[0]
    )
    assert found and int(found[1]) >= 308, shown[0]  # the last sample before it was killed


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], ""),
        ([["7", "", "", "", "500M", "1"], ["7.batch", "", "", "", "", "1"]], ""),
        (
            [
                ["7", "", "", "", "1000M", "2"],
                ["7.batch", "3.50M", "n1", "0", "", "1"],
                ["7.0", "481.25M", "n2", "3", "", "2"],
            ],
            "task 3 on n2 used up to 481 MB; the job requested 500 MB per node",
        ),
        (
            [["7", "", "", "", "1000M", "1"], ["7.0", "12M", "n2", "3", "", "1"]],
            "12 MB; the job requested 1000 MB per node",
        ),
        (
            [["7", "", "", "", "", "1"], ["7.0", "12M", "n2", "3", "", "1"]],
            "task 3 on n2 used up to 12 MB (short peaks are missing)",
        ),
        ([["7", "", "", "", "1M", "1", "sbatch other"], ["7.0", "12M", "n2", "3", "", "1", "srun x"]], ""),
    ],
)
def test_tables_of_sacct(monkeypatch: pytest.MonkeyPatch, rows: list[list[str]], expected: str) -> None:
    """The step with the largest value counts. A job without a sample has no line, and neither has another job with the
    same id. (These tables are written here.)"""
    text = "".join("|".join([*row, "sbatch a|b"][:7]) + "\n" for row in rows)
    monkeypatch.setattr(slurm_client, "run", lambda *arguments, **options: slurm_client.Output((), 0, text, ""))
    found = memory_use.describe("7", lambda line: line == "sbatch other")
    assert expected in found if expected else found == ""
