"""The example programs of this repository pass their own drill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import json_documents

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN_GPT = ["--steps", "40", "--save-every", "8", "--width", "64", "--context", "64"]
ENOUGH_S = 900  # for the drill of 2 ranks, on 2 cores beside other tests


@pytest.mark.more
@pytest.mark.ranks
@pytest.mark.timeout(ENOUGH_S)
@pytest.mark.parametrize(
    ("folder", "keys", "program", "steps"),
    [
        ("killed", ["parallel=ddp"], ["train.py"], 30),
        ("moved", [], ["after.py", "--epochs", "300"], 2400),
        ("train_gpt", ["parallel=ddp"], ["-m", "hpcinit.jobs.train_gpt", *TRAIN_GPT], 40),
    ],
)
def test_an_example_resumes(tmp_path: Path, folder: str, keys: list[str], program: list[str], steps: int) -> None:
    """After each fault it continues from its newest save, with equal losses. Its folder does not change."""
    before = sorted((EXAMPLES / folder).rglob("*"))
    command = [sys.executable, "-m", "hpcinit", "drill", "--json", "ranks_per_node=2", *keys, "--", *program]
    env = os.environ | {"TMPDIR": str(tmp_path), "STEPS": "30"}
    done = subprocess.run(
        command, cwd=EXAMPLES / folder, env=env, capture_output=True, text=True, check=False, timeout=ENOUGH_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json_documents.parse(done.stdout, "drill")
    assert found["steps"] == steps and found["deterministic"]
    parts = {part["part"]: part for part in found["parts"]}
    assert {"preempted", "rank killed", "all ranks killed"} <= parts.keys()
    assert parts["all ranks killed"]["resumed_from"][0] > 0
    assert sorted((EXAMPLES / folder).rglob("*")) == before and not list(tmp_path.iterdir())
