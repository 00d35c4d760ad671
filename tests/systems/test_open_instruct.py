"""open-instruct's weight transfer: a second group besides that of a job with DeepSpeed, on the real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.systems.jobs import (
    PROGRAMS,
    alike,
    said,
    submitted,
)


@pytest.mark.slurm
@pytest.mark.more
@pytest.mark.timeout(300)
def test_open_instruct_weight_transfer(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """ZeRO 3's weights reach two engines of another job bit by bit through a second group, and the job's training continues.

    On CPUs the test checks that no group is bound to a device; it cannot check that NCCL would not split it.
    """
    trainer, engines, port = tmp_path / "trainer", tmp_path / "engines", "29473"
    trainer.mkdir(), engines.mkdir()
    command = [
        "srun",
        "-w",
        "n3,n4",
        "-N2",
        "-n2",
        f"--chdir={tmp_path}",
        sys.executable,
        "-m",
        "hpcinit.run",
        str(PROGRAMS / "instruct_engine.py"),
    ]
    with (tmp_path / "engines.log").open("w") as log:
        waiting = subprocess.Popen(
            [*command, str(engines), "n1", port], env={**os.environ, **idle_slurm.env}, stdout=log, stderr=log
        )
    try:
        words = ('+cluster.sbatch.nodelist="n1,n2"',)
        ranks = submitted(hpcinit, idle_slurm, "instruct_trainer.py", 4, trainer, *words, args=(port,))
        assert waiting.wait(60) == 0, (tmp_path / "engines.log").read_text()
    finally:
        waiting.terminate()
        waiting.wait()
    for each in ranks:
        assert each["made"] == [[None, False]], "one group, before DeepSpeed's start, without device_id"
        assert each["deepspeed"] and each["bound"] is None
        assert len({*each["sent"], each["last"]}) == 3, "it trained before, between and after"
    alike(ranks, "sent", "last")
    got = said(engines, 2)
    assert [(each["got"], each["own"], each["world"]) for each in got] == [(ranks[0]["sent"], 2.0, 2)] * 2
