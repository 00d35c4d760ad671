"""Training gives the same result on 1 rank and on 4, with every wrapper, and on 8 with the largest meshes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.base.versions import installed
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit

# float32 has a relative precision of 6e-8. Sums in another order differ by a few times that; 20 steps on 8 ranks gave a
# difference of 2.2e-7. An error is much larger: a learning rate 1 % too high gives 1.7e-2.
TOLERANCE = 5e-6

WAYS = {
    "ddp 4", "ddp 4, accumulation 2", "fsdp 4, accumulation 2, checkpointing", "hsdp 2x2",
    "tp 2 x ddp 2", "tp 2 x fsdp 2", "sp 2 x ddp 2", "sp 2 x fsdp 2, checkpointing",
    "zero 0", "zero 1", "zero 2", "zero 3", "zero 1, offload", "zero 2, offload", "zero 3, offload",
    "zero 3, offload of parameters", "zero 0, sp 2 x dp 2", "zero 2, sp 2 x dp 2", "zero 3, sp 2 x dp 2",
}  # fmt: skip
OF_8_RANKS = {"hsdp 2x4", "sp 2 x tp 2 x hsdp 2x1", "zero 3, sp 2 x dp 4"}
# One of each wrapper, each dimension and each ZeRO stage; make test-all runs the others.
USUAL = {
    "ddp 4, accumulation 2", "hsdp 2x2", "tp 2 x fsdp 2", "sp 2 x ddp 2", "zero 1, offload", "zero 3, sp 2 x dp 2",
}  # fmt: skip
FEW = {"zero 0", "zero 1", "zero 2, offload", "zero 2, sp 2 x dp 2", "zero 3"}


@pytest.mark.deepspeed
@pytest.mark.timeout(600)
def test_all_wrappers_have_the_losses_of_one_rank(
    hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """12 steps on 2 nodes x 2 ranks have the losses and gradient norms of one rank, with each wrapper.

    With the oldest DeepSpeed only a few of DeepSpeed's wrappers are tested, and without --all six layouts.
    """
    ways = FEW if pytestconfig.getoption("--deepspeed") else WAYS if pytestconfig.getoption("--all") else USUAL
    compare(hpcinit, idle_slurm, tmp_path, 2, ways)


@pytest.mark.more
@pytest.mark.timeout(600)
def test_the_largest_meshes_have_the_losses_of_one_rank(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The same on 4 nodes x 2 ranks, for meshes with more than four ranks or with three dimensions."""
    compare(hpcinit, idle_slurm, tmp_path, 4, OF_8_RANKS)


def compare(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, nodes: int, ways: set[str]) -> None:
    program = Path(__file__).with_name("equivalence.py")
    # One job, and one import of torch and DeepSpeed per node: imports take most of the time.
    request = [
        f"nodes={nodes}",
        "ranks_per_node=2",
        "launch=fork",
        "launch.preload=[torch,deepspeed]",
        "wait=true",
        "--",
    ]
    words = (*request, str(program), str(tmp_path / "curves.json"), *ways)
    done = submit(hpcinit, slurm, *words, timeout=580)
    assert done.returncode == 0, (folder_of(done) / "logs/rank-0.log").read_text()[-4000:]
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert curves.pop("deepspeed") == installed("deepspeed")
    alone, other = curves.pop("alone"), curves.pop("alone, learning rate 1 % higher")
    assert len(alone["loss"]) == 12 and alone["loss"][-1] < alone["loss"][0] / 3, "it learns"
    assert differs(other, alone) > 1000 * TOLERANCE, "what is slightly wrong shows"
    assert set(curves) == ways
    assert {name: off for name, curve in curves.items() if not (off := differs(curve, alone)) < TOLERANCE} == {}


def differs(curve: dict[str, list[float | None]], alone: dict[str, list[float]]) -> float:
    """Return the largest relative difference of a loss or norm. DeepSpeed has no norm in ZeRO 0."""
    pairs = [pair for what in alone for pair in zip(curve[what], alone[what], strict=True)]
    return max(abs(value - expected) / expected for value, expected in pairs if value is not None)
