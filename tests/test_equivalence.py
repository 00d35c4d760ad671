"""Training gives the same result on 1 rank and on 8, with every wrapper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.base.versions import installed
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit

# float32 has a relative precision of 6e-8. Sums in another order differ by a few times that; 20 steps gave a difference
# of 2.2e-7. An error is much larger: a learning rate 1 % too high gives 1.6e-2.
TOLERANCE = 5e-6

WAYS = {
    "ddp 8", "ddp 8, accumulation 2", "fsdp 8, accumulation 2, checkpointing", "hsdp 2x4",
    "tp 2 x ddp 4", "tp 2 x fsdp 4", "sp 2 x ddp 4", "sp 2 x fsdp 4, checkpointing", "sp 2 x tp 2 x hsdp 2x1",
    "zero 0", "zero 1", "zero 2", "zero 3", "zero 1, offload", "zero 2, offload", "zero 3, offload",
    "zero 3, offload of parameters", "zero 0, sp 2 x dp 4", "zero 2, sp 2 x dp 4", "zero 3, sp 2 x dp 4",
}  # fmt: skip
FEW = {"zero 0", "zero 1", "zero 2, offload", "zero 2, sp 2 x dp 4", "zero 3"}


@pytest.mark.deepspeed
@pytest.mark.timeout(600)
def test_all_wrappers_have_the_losses_of_one_rank(
    hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """20 steps on 4 nodes x 2 ranks have the losses and gradient norms of one rank, with every wrapper.

    With the oldest DeepSpeed only a few of DeepSpeed's wrappers are tested.
    """
    ways = FEW if pytestconfig.getoption("--deepspeed") else WAYS
    program = Path(__file__).with_name("equivalence.py")
    request = ["nodes=4", "ranks_per_node=2", "launch=fork", "wait=true", "--"]
    words = (*request, str(program), str(tmp_path / "curves.json"), *ways)
    done = submit(hpcinit, idle_slurm, *words, timeout=580)  # in one job, because imports take most of the time
    assert done.returncode == 0, (folder_of(done) / "logs/rank-0.log").read_text()[-4000:]
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert curves.pop("deepspeed") == installed("deepspeed")
    alone, other = curves.pop("alone"), curves.pop("alone, learning rate 1 % higher")
    assert len(alone["loss"]) == 20 and alone["loss"][-1] < alone["loss"][0] / 4, "it learns"
    assert differs(other, alone) > 1000 * TOLERANCE, "what is slightly wrong shows"
    assert set(curves) == ways
    assert {name: off for name, curve in curves.items() if not (off := differs(curve, alone)) < TOLERANCE} == {}


def differs(curve: dict[str, list[float | None]], alone: dict[str, list[float]]) -> float:
    """Return the largest relative difference of a loss or norm. DeepSpeed has no norm in ZeRO 0."""
    pairs = [pair for what in alone for pair in zip(curve[what], alone[what], strict=True)]
    return max(abs(value - expected) / expected for value, expected in pairs if value is not None)
