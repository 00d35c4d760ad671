"""The examples, copied into an empty folder and submitted with their own commands to a real Slurm."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.minislurm import MiniSlurm
from tests.submit.test_restart import finish, restarts, state
from tests.submitting import printed
from tests.waiting import until

EXAMPLES = Path(__file__).parent.parent / "examples"
MOVED = EXAMPLES / "moved"
# One import per node of torch and of what three or four of the programs import later.
MODULES = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
FORK = ("launch=fork", f"launch.preload=[{','.join(MODULES)}]")
# While the file `slow` exists, every step takes long, so that a preemption happens in the middle.
SLOW = (
    "import os, time; import torch.nn.functional as F; f = F.mse_loss\n"
    "F.mse_loss = lambda *a: (os.path.exists('slow') and time.sleep(0.1), f(*a))[1]\n"
)


def submit(example: str, tmp_path: Path, slurm: MiniSlurm, *words: str, **env: str) -> list[Path]:
    """Run the example's submit.sh as a user does; return its run folders in the order of submission."""
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [tmp_path / example / "submit.sh", *words], env=os.environ | slurm.env | {"PATH": path} | env,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in re.findall(r"^run folder: (.*)$", done.stdout, re.MULTILINE)]


def job_of(folder: Path) -> str:
    record: dict[str, str] = json.loads((folder / "submission.json").read_text())
    return record["job_id"]


def last_line(folder: Path, slurm: MiniSlurm) -> str:
    """Return the last line of rank 0 after the job has completed."""
    assert finish(slurm, job_of(folder), 300) == "COMPLETED", (folder / "logs/job.log").read_text()
    return printed(folder, 0).splitlines()[-1]


@pytest.mark.more
@pytest.mark.slurm
def test_one_program_divided_in_four_ways(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """On 2 nodes x 2 ranks DDP, FSDP2 and ZeRO-3 reach the same losses, and every rank has its log.

    Tensor parallelism reaches different losses, because it has two shares of the data instead of four.
    """
    folders = submit("train_gpt", tmp_path, idle_slurm, *FORK)
    assert [folder.name for folder in folders] == ["ddp-0001", "fsdp-0001", "zero3-0001", "tp-0001"]
    *same, tensor_parallel = [last_line(folder, idle_slurm) for folder in folders]
    assert len(set(same)) == 1 and tensor_parallel != same[0]
    for line in (same[0], tensor_parallel):
        first, last = map(float, re.findall(r"^loss (\S+) -> (\S+) in 10 steps", line)[0])
        assert last < first - 0.3
    for folder in folders:
        assert sorted(path.name for path in folder.glob("logs/rank-*.log")) == [f"rank-{rank}.log" for rank in range(4)]


def test_a_script_moves_with_fewer_than_ten_lines() -> None:
    """moved.diff is the difference of before.py and after.py, and has fewer than ten changed lines."""
    before, after = ((MOVED / name).read_text().splitlines(keepends=True) for name in ("before.py", "after.py"))
    diff = list(difflib.unified_diff(before, after, "before.py", "after.py", n=1))
    assert "".join(diff) == (MOVED / "moved.diff").read_text()
    assert 0 < sum(line[0] in "+-" for line in diff[2:]) < 10


@pytest.mark.more
@pytest.mark.slurm
def test_a_script_that_was_moved_survives_preemption(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The script for torchrun runs unchanged. Converted, and also preempted in the middle, it reaches the same loss."""
    slurm = idle_slurm
    before, after = [last_line(folder, slurm) for folder in submit("moved", tmp_path, slurm)]
    assert re.fullmatch(r"epoch 7 loss of rank 0: 0\.0\d+", before) and after == before

    (tmp_path / "sitecustomize.py").write_text(SLOW)
    (tmp_path / "preempted/slow").touch()
    [folder] = submit("preempted", tmp_path, slurm, PYTHONPATH=str(tmp_path))
    until((tmp_path / "preempted/snapshot.pt").exists, 120)
    high = slurm.run(
        "sbatch", "--parsable", "-N4", "--exclusive", "--partition=high", "--output=/dev/null", "--wrap=sleep 3"
    ).strip()
    until(lambda: state(slurm, high) in ("RUNNING", "COMPLETED"))
    (tmp_path / "preempted/slow").unlink()
    assert last_line(folder, slurm) == before
    assert [(number, why) for number, why, *_ in restarts(folder)] == [(1, "slurm")]
    assert printed(folder, 0).count("epoch 0 loss") == 1, "the second attempt did not start from epoch 0"


@pytest.mark.slurm
def test_a_sweep(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Three learning rates run in one array, each from the start: the smallest one learns least."""
    [sweep] = submit("sweep", tmp_path, idle_slurm)
    losses = []
    for task in ("0", "1", "2"):
        line = last_line(sweep / task, idle_slurm)
        losses.append(float(re.findall(r"^epoch 7 loss of rank 0: (\S+)", line)[0]))
        assert printed(sweep / task, 0).count("epoch 0 loss") == 1
    assert losses[2] > 1 > losses[1] and losses[2] > losses[0]
    assert {job_of(sweep / task).split("_")[1] for task in ("0", "1", "2")} == {"0", "1", "2"}
